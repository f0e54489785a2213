"""The margin before a deadline: what the server sees by feedback, and what it does not by how late its event loop is."""

import asyncio
import time

from nestling.serve.way import KEPT, Way


def test_a_late_event_loop_takes_twice_that_off_the_deadline() -> None:
    way = Way()
    before = way.before(0.02)
    for _ in range(KEPT):
        way.beaten(0.001)
    assert abs(before - way.before(0.02) - 0.002) < 1e-9
    for _ in range(KEPT):
        way.beaten(0.1)
    assert way.before(0.02) == 0.01, "never more than half of the time is given away"
    for _ in range(2 * KEPT):
        way.beaten(0.0)
    assert way.before(0.02) == before, "it is forgotten again"


def test_answers_that_were_late_make_the_margin_larger() -> None:
    way = Way()
    before = way.before(0.02)
    way.observe(0.005)
    assert way.before(0.02) < before


def test_it_sees_how_late_the_loop_is() -> None:
    async def busy(way: Way) -> None:
        beating = asyncio.ensure_future(way.beat())
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            time.sleep(0.02)  # keeps the loop from its timers
            await asyncio.sleep(0)
        beating.cancel()

    way = Way()
    asyncio.run(busy(way))
    assert way.both > 0.01
