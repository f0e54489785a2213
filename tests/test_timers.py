"""Timers of the server's event loop: when they are due, not a millisecond later; and everything else a loop must do."""

import asyncio
import socket
import statistics
import time

import pytest

from nestling.serve import timers


def lateness(run: object) -> float:
    async def measure() -> list[float]:
        found = []
        for _ in range(60):
            due = time.monotonic() + 0.0021
            await asyncio.sleep(0.0021)
            found.append(time.monotonic() - due)
        return found

    assert callable(run)
    return statistics.median(run(measure()))


@pytest.mark.skipif(not hasattr(__import__("select"), "epoll"), reason="no epoll here")
def test_timers_are_sooner_than_asyncios_own() -> None:
    assert lateness(timers.run) < lateness(asyncio.run) - 0.0002


def test_a_long_wait_ends_when_something_comes() -> None:
    async def main() -> tuple[bytes, float]:
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        loop, began = asyncio.get_running_loop(), time.monotonic()
        loop.call_later(0.05, theirs.send, b"x")
        loop.call_later(30, print)
        found = await loop.sock_recv(mine, 1)
        took = time.monotonic() - began
        mine.close()
        theirs.close()
        return found, took

    found, took = timers.run(main())
    assert found == b"x" and 0.04 < took < 5


def test_other_threads_can_wake_it() -> None:
    async def main() -> str:
        return await asyncio.wait_for(asyncio.to_thread(lambda: "done"), 5)

    assert timers.run(main()) == "done"
