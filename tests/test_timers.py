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


@pytest.mark.skipif(not hasattr(__import__("select"), "epoll"), reason="no epoll here")
@pytest.mark.parametrize("busy", [False, True])
def test_what_comes_while_the_loop_is_busy_is_known_to_have_waited(busy: bool) -> None:
    async def main() -> float:
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        loop, read = asyncio.get_running_loop(), asyncio.Event()
        waited: list[float] = []

        def note() -> None:
            waited.append(time.monotonic() - timers.since())
            loop.remove_reader(mine)
            read.set()

        def send() -> None:
            theirs.send(b"x")
            time.sleep(0.1 * busy)

        loop.add_reader(mine, note)
        loop.call_later(0.01, send)
        await asyncio.wait_for(read.wait(), 5)
        mine.close()
        theirs.close()
        return waited[0]

    waited = timers.run(main())
    assert waited >= 0.1 if busy else waited < 0.1


def test_another_loop_knows_nothing_of_that() -> None:
    async def main() -> float:
        return time.monotonic() - timers.since()

    assert 0 <= asyncio.run(main()) + 1e-3 < 0.1
