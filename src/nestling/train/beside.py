"""Runs side by side in one process on one GPU, taking turns step by step: small networks do not fill a chip alone.

In: recipes and folders, most valuable first. Out: an Outcome for each run as soon as it is finished or has failed; the next
run that can be finished in time then takes its place. Each run is what it would be alone: they share the data in memory and
nothing else. A run that fails does not touch the others; one that finds no memory waits until another is done. Runs that
were begun go on.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from nestling.data import DataSet, load
from nestling.errors import NestlingError
from nestling.files import RECIPE
from nestling.recipes.recipe import Recipe
from nestling.runs.device import pick_device
from nestling.runs.folder import RunDir
from nestling.train import progress
from nestling.train.begin import prepare
from nestling.train.capabilities import OutOfMemory, more_queues
from nestling.train.loop import Training
from nestling.train.stop import StopRequest, on_signal

Takes = Callable[[Recipe, str], float]


@dataclass(frozen=True)
class Outcome:
    """A run that is finished, or why it has failed."""

    path: str
    error: NestlingError | None = None


@dataclass(frozen=True, eq=False)
class Turn:
    """A run in progress."""

    recipe: Recipe
    path: str
    training: Training
    steps: Iterator[tuple[int, int]]


def side_by_side(
    runs: Iterable[tuple[Recipe, str]],
    beside: int,
    command: str = "nestling.train",
    seconds: float = inf,
    least: float = -inf,
    quiet: bool = False,
    takes: Takes | None = None,
) -> Iterator[Outcome]:
    """Train all runs, `beside` at a time.

    After `seconds` those in progress stop at the end of the epoch with a checkpoint, to be gone on with in another call, and
    none is begun when fewer than `least` are left. `takes`: about how many seconds of the whole device are left of a run;
    what would not be finished in time then waits, unless nothing else is to do. Ctrl-C and SIGTERM stop after the step, with
    checkpoints of the last whole epochs (raises Stopped).
    """
    waiting, done, full = deque(runs), 0, False
    many, until = len(waiting), time.monotonic() + seconds
    data: dict[Any, DataSet] = {}
    turns: list[Turn] = []
    more_queues()
    with on_signal() as stop, ExitStack() as held, progress.bar(f"{many} runs", quiet) as shown:
        while True:
            while waiting and not full and len(turns) < beside and until - time.monotonic() >= least and not stop.asked:
                place = fitting(waiting, turns, until - time.monotonic(), takes)
                if place is None:
                    full = True  # until another is done
                    break
                recipe, path = waiting[place]
                del waiting[place]
                try:
                    training = ready(recipe, path, command, data, until, shown, stop, beside, alone=not turns)
                except NestlingError as error:
                    if turns and isinstance(error, OutOfMemory):  # there is room for no more
                        beside = len(turns)
                        waiting.appendleft((recipe, path))
                    else:
                        yield Outcome(path, error)
                    continue
                if training is None:
                    done += 1
                    yield Outcome(path)
                else:
                    held.callback(training.run.release)
                    turns.append(Turn(recipe, path, training, training.epochs(beside)))
                del training  # else what it holds of the device would be free only when the next has begun
            if not turns:
                break
            for turn in list(turns):
                try:
                    step = next(turn.steps, None)
                    if step is not None:
                        if turn is turns[0]:
                            shown(turn.training, *step)
                        continue
                    if turn.training.finished:
                        turn.training.finish()
                        done += 1
                        yield Outcome(turn.path)
                except OutOfMemory as error:
                    if len(turns) == 1:
                        yield Outcome(turn.path, error)
                    else:  # there is room for fewer
                        beside = len(turns) - 1
                        waiting.appendleft((turn.recipe, turn.path))
                except NestlingError as error:
                    yield Outcome(turn.path, error)
                turn.training.run.release()
                turns.remove(turn)
                full = False
            del turn
    if stop.asked and done < many:
        raise stop.stopped(f" with {done} of {many} runs finished; the others go on when called again")


def fitting(
    waiting: Sequence[tuple[Recipe, str]], turns: Sequence[Turn], left: float, takes: Takes | None
) -> int | None:
    """The place of the first run that can be finished beside those in progress in the seconds left. Where nothing is in
    progress the first of all is begun, to be gone on with later; None: better wait."""
    if takes is None:
        return 0
    busy = sum(takes(turn.recipe, turn.path) for turn in turns)
    fits = (place for place, run in enumerate(waiting) if busy + takes(*run) <= left)
    return next(fits, None if turns else 0)


def ready(
    recipe: Recipe,
    path: str,
    command: str,
    data: dict[Any, DataSet],
    until: float,
    shown: "progress.Shown | progress.Lines",
    stop: StopRequest,
    beside: int,
    alone: bool,
) -> Training | None:
    """A run over its folder, new or resumed; None if it is finished. Data is loaded once and shared."""
    if not alone and torch.cuda.is_available():
        torch.cuda.synchronize()  # kernels are chosen by their speed, which is measured on a quiet chip
    key = (recipe.data, recipe.train.device)
    if key not in data:
        with shown.startup.step("data"):
            data[key] = load(recipe.data, pick_device(recipe.train.device))
    begun = RunDir(path).has(RECIPE)
    return prepare(recipe, path, begun, command, data[key], until, shown.startup, beside, stop)
