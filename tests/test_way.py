"""The margin before a deadline: what the server sees by feedback, and what it does not by how late its event loop is."""

import asyncio
import random
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


def test_the_two_parts_share_the_one_in_a_hundred_that_may_be_late() -> None:
    chance, way, late = random.Random(0), Way(), 0
    for count in range(60_000):
        out = chance.expovariate(1e3)
        late += count >= 10_000 and out > way.value
        way.observe(out)
    assert 0.003 < late / 50_000 < 0.007, "from when an answer is due until it is on its way"
    for count in range(KEPT + 1):
        way.beaten(4e-3 if count in (100, 250, 350) else 0.0)
    assert way.both >= 4e-3, "6 of 800 ways there and back take that long"


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
