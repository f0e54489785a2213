"""The scheduler in simulated time: nobody is lost or answered twice, stage 1 comes first, and no time goes to who has none."""

import random
from collections.abc import Sequence
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import Costs, Simulation

from nestling.serve.scheduler import CAUTION, Full, Scheduler, StageBatch, Ticket

CPU = Costs((1e-3, 1.9e-3, 4e-3), (0.95e-3, 1.8e-3, 3.7e-3))  # images go one by one: joining them saves nothing
KEPT = Costs((1e-3, 1.9e-3, 7e-3), (0.95e-3, 1.8e-3, 6.7e-3), last=7e-3)  # the last stage needs nothing of those before
GPU = Costs((1e-3, 1e-3, 1e-3), (0.05e-3, 0.05e-3, 0.05e-3))
Arrivals = list[tuple[float, float]]

times = st.floats(0, 0.05).map(lambda value: round(value, 5))
limits = st.one_of(st.floats(0, 0.03).map(lambda value: round(value, 5)), st.just(inf))
traffic = st.lists(st.tuples(times, limits), max_size=40)
machines = st.builds(
    Simulation,
    costs=st.sampled_from([CPU, KEPT, GPU]),
    keep=st.sampled_from([1, 3, 10_000]),
    most=st.sampled_from([1, 4, 64]),
    slower=st.sampled_from([0.5, 1.0, 3.0]),
    stops=st.booleans(),
)


def poisson(rate: float, seconds: float, limit: float, seed: int = 0) -> Arrivals:
    chance, at, found = random.Random(seed), 0.0, []
    while (at := at + chance.expovariate(rate)) < seconds:
        found.append((at, limit))
    return found


def shares(tickets: Sequence[Ticket]) -> list[float]:
    return [sum(ticket.best[0] == stage for ticket in tickets) / len(tickets) for stage in range(4)]


@given(machines, traffic)
def test_nobody_is_lost_and_nobody_answered_twice(machine: Simulation, arrivals: Arrivals) -> None:
    tickets = machine.run(arrivals)
    for ticket in tickets:
        assert len(machine.over[id(ticket)]) == 1
        assert ticket.order == -1
    assert machine.scheduler.open == machine.scheduler.holding == 0


@given(machines, traffic)
def test_who_has_no_time_left_is_never_run_and_never_keeps_others_waiting(
    machine: Simulation, arrivals: Arrivals
) -> None:
    machine.run(arrivals)
    for now, batch in machine.began:
        assert all(ticket.deadline > now for ticket in batch.tickets)


@given(machines, traffic)
def test_nobody_loses_stage_1_to_who_has_it(machine: Simulation, arrivals: Arrivals) -> None:
    """Where images go one by one, everybody gets stage 1 before anybody gets another, the earliest deadline first; where they
    go together, whoever has no stage yet is still in time afterwards; and the last stage is computed at once where everybody
    who waits could have it."""
    machine.run(arrivals)
    for (now, batch), waited in zip(machine.began, machine.fresh, strict=True):
        first = CAUTION * machine.costs.predict(1)
        in_time = [ticket for ticket in waited if now + first <= ticket.deadline]
        if not in_time:
            continue
        earliest = min(ticket.deadline for ticket in in_time)
        if batch.straight:
            ends = now + CAUTION * KEPT.last * (1 + np.arange(len(in_time)))
            assert machine.costs is KEPT and (ends <= sorted(ticket.deadline for ticket in in_time)).all()
        elif machine.costs is not GPU or batch.stage == 1:
            assert batch.stage == 1 and not batch.late and batch.tickets[0].deadline == earliest
        else:
            assert now + CAUTION * machine.costs.predict(batch.stage, len(batch.tickets)) + first <= earliest


@given(machines, traffic)
def test_stages_come_in_order_and_all_of_them_where_there_is_no_deadline(
    machine: Simulation, arrivals: Arrivals
) -> None:
    tickets = machine.run(arrivals)
    assert all(ticket.best[0] == 3 and ticket.final for ticket in tickets if ticket.deadline == inf)
    assert machine.held <= machine.keep + machine.most


@given(traffic, st.lists(st.tuples(times, st.floats(1e-5, 1e-3)), max_size=10))
def test_who_cannot_be_in_time_costs_the_others_nothing(arrivals: Arrivals, hopeless: Arrivals) -> None:
    def stages(more: Arrivals) -> list[int]:
        return [ticket.best[0] for ticket in Simulation(CPU).run([*arrivals, *more])[: len(arrivals)]]

    assert stages(hopeless) == stages([])


@given(machines, traffic)
def test_the_same_requests_at_the_same_times_give_the_same_batches(machine: Simulation, arrivals: Arrivals) -> None:
    def story(simulation: Simulation) -> list[tuple[float, int, list[int]]]:
        tickets = simulation.run(arrivals)
        places = {id(ticket): index for index, ticket in enumerate(tickets)}
        return [(at, batch.stage, [places[id(ticket)] for ticket in batch.tickets]) for at, batch in simulation.began]

    fresh = Simulation(machine.costs, machine.room, machine.keep, machine.most, machine.slower, machine.stops)
    assert story(machine) == story(fresh)


def test_overload_costs_stages_and_not_answers() -> None:
    """The full net takes 6.9 ms: alone it could answer 145 requests a second."""
    seen = [shares(Simulation(CPU).run(poisson(load * 145, 5, 0.02))) for load in (0.5, 1, 2, 4)]
    nothing, last = [each[0] for each in seen], [each[3] for each in seen]
    assert nothing[:3] == [0, 0, 0] and nothing[3] < 0.01
    assert last == sorted(last, reverse=True) and last[0] > 0.9
    assert 1 - seen[2][1] > 0.5, "at twice the load most still get more than stage 1"


def test_images_go_together_where_that_pays() -> None:
    together = Simulation(GPU)
    tickets = together.run(poisson(5000, 1, 0.05))
    assert max(len(batch.tickets) for _, batch in together.began) > 4
    assert shares(tickets)[3] > 0.99
    alone = Simulation(CPU)
    alone.run(poisson(500, 1, 0.05))
    assert max(len(batch.tickets) for _, batch in alone.began) == 1


def test_a_long_stage_is_stopped_for_who_would_get_nothing_otherwise() -> None:
    arrivals = [(0.0, inf), (0.0035, 2e-3)]
    stopping = Simulation(CPU)
    assert [ticket.best[0] for ticket in stopping.run(arrivals)] == [3, 1]
    assert stopping.stopped == 1
    assert [ticket.best[0] for ticket in Simulation(CPU, stops=False).run(arrivals)] == [3, 0]


def test_a_long_stage_is_stopped_for_many_who_are_late_only_together() -> None:
    arrivals = [(0.0, inf), *[(0.0035, 6e-3)] * 5]
    stopping = Simulation(CPU)
    assert [ticket.best[0] for ticket in stopping.run(arrivals)] == [3, 1, 1, 1, 1, 1]
    assert stopping.stopped == 1
    assert Simulation(CPU, stops=False).run(arrivals)[-1].best[0] == 0


def stages_run(arrivals: Arrivals, costs: Costs = KEPT) -> list[int]:
    simulation = Simulation(costs)
    simulation.run(arrivals)
    return [batch.stage for _, batch in simulation.began]


def test_the_last_stage_is_computed_at_once_where_there_is_time_for_everybody() -> None:
    assert stages_run([(0.0, 0.02)]) == stages_run([(0.0, inf)]) == [3]
    assert stages_run([(0.0, 0.03), (0.0, 0.03)]) == [3, 3]
    assert stages_run([(0.0, 0.02), (0.0, 0.02)])[:2] == [1, 1], "both could hardly have it"
    assert stages_run([(0.0, 0.008)]) == [1, 2], "a little slower than expected, and there would be nothing"
    assert stages_run([(0.0, 0.02)], CPU) == [1, 2, 3], "this engine cannot"
    slow = Costs(KEPT.one, KEPT.more, last=0.011)
    assert stages_run([(0.0, 0.03)], slow) == [1, 2, 3], "one by one is sooner"


def test_who_wants_to_see_every_stage_or_a_sure_one_gets_them_one_by_one() -> None:
    for ticket in (Ticket(None, inf, trail=[]), Ticket(None, inf, confident=(0.9, 0.9, 0.9))):
        scheduler = Scheduler(KEPT, 3, jumps=True)
        scheduler.add([ticket])
        batch, _ = scheduler.turn(0)
        assert batch is not None and batch.stage == 1


def test_computing_at_once_is_stopped_for_who_would_get_nothing_otherwise() -> None:
    simulation = Simulation(KEPT)
    tickets = simulation.run([(0.0, 0.02), (0.001, 3e-3)])
    assert simulation.stopped == 1 and [ticket.best[0] for ticket in tickets] == [3, 1]


def test_computing_at_once_that_takes_too_long_is_given_up_for_stage_1() -> None:
    slow = Simulation(KEPT, slower=1.8)  # than expected: 12.6 ms
    assert [ticket.best[0] for ticket in slow.run([(0.0, 0.012)])] == [1] and slow.stopped == 1
    assert [batch.stage for _, batch in slow.began][:2] == [3, 1]


def test_at_low_load_computing_at_once_pays() -> None:
    arrivals = poisson(65, 5, 0.018)
    steps = Simulation(Costs(KEPT.one, KEPT.more)).run(arrivals)
    at_once = Simulation(KEPT).run(arrivals)
    assert shares(at_once)[0] == 0 and shares(at_once)[3] > shares(steps)[3] + 0.05


def test_who_has_nothing_yet_waits_longer_than_for_another_stage() -> None:
    scheduler = Scheduler(CPU, 3)
    patient, hasty = Ticket(None, 1e-3, latest=4e-3), Ticket(None, 1e-3)
    scheduler.add([patient, hasty])
    batch, over = scheduler.turn(0)
    assert batch is not None and batch.tickets == (patient,) and not batch.late and not over
    finish(scheduler, batch, now=1.05e-3)
    assert patient.best[0] == 1 and patient.over, "for a second stage it does not wait"
    assert scheduler.turn(1.05e-3) == (None, [hasty]) and hasty.best[0] == 0


def test_when_there_is_no_room_nobody_else_is_taken() -> None:
    scheduler = Scheduler(CPU, 3, room=3)
    scheduler.add([Ticket(None, inf), Ticket(None, inf)])
    with pytest.raises(Full):
        scheduler.add([Ticket(None, inf), Ticket(None, inf)])
    assert scheduler.open == 2
    scheduler.add([Ticket(None, inf)])
    assert scheduler.waits() == 3


def finish(
    scheduler: Scheduler, batch: StageBatch, logits: Sequence[float] = (0, 0, 0), now: float = 0.0
) -> list[Ticket]:
    return scheduler.finish(batch, object(), np.array([logits] * len(batch.tickets), np.float32), now)


def test_an_image_that_is_sure_enough_takes_no_more_work() -> None:
    scheduler = Scheduler(CPU, 3)
    ticket = Ticket(None, inf, confident=(0.9, 0.9, 0.9))
    scheduler.add([ticket])
    batch, _ = scheduler.turn(0)
    assert batch is not None and finish(scheduler, batch, (9, 0, 0)) == [ticket]
    assert ticket.final and ticket.over and scheduler.turn(0) == (None, [])


def test_logits_that_are_not_numbers_are_an_error_of_that_image_alone() -> None:
    scheduler = Scheduler(GPU, 3)
    tickets = [Ticket(None, inf), Ticket(None, inf)]
    scheduler.add(tickets)
    batch, _ = scheduler.turn(0)
    assert batch is not None and len(batch.tickets) == 2
    scheduler.finish(batch, object(), np.array([[np.nan, 0, 0], [1, 0, 0]], np.float32), 0)
    assert tickets[0].over and isinstance(tickets[0].error, ArithmeticError)
    assert not tickets[1].over and tickets[1].best[0] == 1


def test_a_job_may_leave_while_it_runs_and_come_back_with_what_it_has() -> None:
    scheduler = Scheduler(CPU, 3)
    ticket = Ticket(None, 1.0)
    scheduler.add([ticket])
    batch, _ = scheduler.turn(0)
    assert batch is not None
    scheduler.leave(ticket)
    assert scheduler.yields(batch, 0, 0), "nobody waits for what is running"
    scheduler.add([ticket])
    assert not scheduler.yields(batch, 0, 0)
    assert scheduler.turn(0) == (None, []), "it is not run twice"
    finish(scheduler, batch)
    second, _ = scheduler.turn(0)
    assert second is not None and (second.stage, second.tickets) == (2, (ticket,))
    scheduler.leave(ticket)
    finish(scheduler, second)
    assert ticket.best[0] == ticket.done == 2 and scheduler.open == scheduler.holding == 0
    ticket.deadline = 2.0
    scheduler.add([ticket])
    third, _ = scheduler.turn(1)
    assert third is not None and third.stage == 3


def test_who_leaves_a_batch_keeps_its_own_state_and_not_that_of_everybody() -> None:
    scheduler = Scheduler(GPU, 3)
    tickets = [Ticket(None, 1.0) for _ in range(2)]
    scheduler.add(tickets)
    first, _ = scheduler.turn(0)
    assert first is not None and len(first.tickets) == 2
    scheduler.leave(tickets[0])
    finish(scheduler, first)
    assert tickets[0].best[0] == 1 and tickets[0].state is None and not tickets[0].running
    assert tickets[1].done == 1 and tickets[1].state is not None and scheduler.holding == 1
    scheduler.leave(tickets[1])
    scheduler.add([tickets[0]])
    again, _ = scheduler.turn(0)
    assert again is not None and again.stage == 1, "it begins anew"


def test_those_who_leave_take_no_memory() -> None:
    scheduler = Scheduler(CPU, 3, room=10)
    for _ in range(1000):
        ticket = Ticket(None, inf)
        scheduler.add([ticket])
        scheduler.leave(ticket)
    assert len(scheduler.waiting[0]) < 100 and scheduler.waits() == 0


def test_a_failed_batch_is_over_for_everybody_in_it() -> None:
    scheduler = Scheduler(GPU, 3)
    tickets = [Ticket(None, inf), Ticket(None, inf)]
    scheduler.add(tickets)
    first, _ = scheduler.turn(0)
    assert first is not None
    finish(scheduler, first)
    second, _ = scheduler.turn(0)
    assert second is not None and second.stage == 2
    scheduler.fail(second, RuntimeError("out of memory"))
    assert all(ticket.over and ticket.final and ticket.error for ticket in tickets)
    assert scheduler.open == scheduler.holding == 0
