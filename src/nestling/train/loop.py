"""One run in progress, epoch by epoch, resumable after each. Any network of the registry, any strategy.

In: a recipe and a run folder. Out: weights, log, results and a checkpoint in that folder. Everything random comes from the
recipe's seed and the number of the epoch, so a resumed run goes on bit for bit (on a CPU). What happens to a batch is
step.py's business, how batches are driven is stepping.py's, what a device can do capabilities.py's; run.py begins and ends runs.
"""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nestling.data import DataSet, load
from nestling.errors import NestlingError, say_once
from nestling.files import CHECKPOINT, DiskFull
from nestling.gradients.reduce import group_of
from nestling.nets import Plan, build
from nestling.nets.synced import averaged, synchronise
from nestling.recipes.recipe import Recipe, from_dict
from nestling.runs import evaluate
from nestling.runs.device import first_line, pick_device
from nestling.runs.folder import RunDir
from nestling.runs.goal import NUMBERS, Examined, check_goals, check_targets, goal_of
from nestling.train import stepping
from nestling.train.board import Board
from nestling.train.capabilities import able, cache_kernels, lacks_memory, memory_explained
from nestling.train.ended import Ended, Moment, leaving, leaving_together
from nestling.train.kept import adopt
from nestling.train.progress import Startup
from nestling.train.schedule import epoch_rates
from nestling.train.step import Step
from nestling.train.stop import StopRequest

REMEDY = "Lower train.lr, set train.clip, or use strategy.name=osgd-norm."


class Training:
    """One run in progress. `epochs()` does the work; everything that has to survive a kill goes through `run`."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunDir,
        data: DataSet | None = None,
        until: float = float("inf"),
        startup: Startup | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        """`until`: a moment of time.monotonic() after which to stop, with a checkpoint, at the end of an epoch.
        `stop`: once asked, stops after the step, with a checkpoint of the last whole epoch."""
        self.recipe, self.run, self.until, self.startup = recipe, run, until, startup or Startup()
        self.stop = stop or StopRequest()
        with self.startup.step("device"):
            self.device = pick_device(recipe.train.device)
        self.able = recipe  # as this device can carry it out
        self.given_up: list[str] = []  # what it cannot
        if self.device.type == "cuda":
            cache_kernels()
            self.able, self.given_up = able(recipe)
            for message in self.given_up:
                say_once(message)
        if data is None:
            with self.startup.step("data"):
                data = load(recipe.data, self.device)
        self.data = data
        with self.startup.step("network"):
            seed = torch.Generator().manual_seed(recipe.train.seed)
            net = build(recipe.network, classes=len(self.data.classes), shape=self.data.shape, generator=seed)
            if recipe.network.keep and not run.has(CHECKPOINT):  # else the checkpoint has its weights
                adopt(net, recipe)
            memory = torch.channels_last if recipe.train.channels_last else torch.contiguous_format
            self.net = net.to(self.device, memory_format=memory)  # type: ignore[call-overload]
            if recipe.train.sync_norms and group_of(True) is not None:
                synchronise(self.net)
            if not self.net.training:  # else what its owner has put into evaluation stays there
                self.net.train()
            self.goal = goal_of(self.data.test, recipe.train)
            self.data = named_classes(self.data, self.net.plan, self.goal)
            if self.data.name == "own":
                stepping.steps_per_epoch(self.data.train, recipe.train.batch)  # refuses data without a batch
                (x, y), (others, _) = (next(iter(part.batches(2))) for part in (self.data.train, self.data.test))
                for inputs in (x, others):
                    evaluate.check_inputs(self.net, inputs[:2])
                check_goals(y, self.goal, recipe.train)
            self.optimizer = make_optimizer(self.net, recipe, self.device)
            self.batch = stepping.batch_of(self.data.train, recipe.train.batch)
            self.engine = stepping.kind(recipe, self.device, self.data.train)
            self.step = self.make_step(compiled=self.engine == "graph" and self.able.train.compile)
        # Greedy training gives every stage the recipe's epochs, one stage after another.
        self.total = recipe.train.epochs * (len(self.step.greedy.trained) if self.step.greedy else 1)
        self.check_average()
        self.done = 0  # epochs whose line is in the log
        self.saved = 0  # epochs of the newest checkpoint
        self.unsaved: dict[str, Tensor] = {}  # the state after `done` epochs, where it is not in a checkpoint yet
        self.newest: dict[str, Any] = {}  # line of the log
        self.examined: Examined | None = None  # the newest answers to the test split
        self.board = Board(run.path) if recipe.train.tensorboard else None
        self.main = main_rank()

    def check_average(self) -> None:
        """Say so where a run is too short for its average: what it began with, norms' statistics too, would be part of it."""
        average = self.recipe.train.average
        steps = self.total * stepping.steps_per_epoch(self.data.train, self.recipe.train.batch)
        if average and average**steps > 0.01 and steps:
            fitting = int(1000 * 0.01 ** (1 / steps)) / 1000
            say_once(
                f"train.average={average:g} is too much for the {steps} steps of this run: {average**steps:.0%} of what is saved "
                f"will be what it began with; set train.average={fitting:g} or less, or 0"
            )

    def make_step(self, compiled: bool) -> Step:
        self.compiled = compiled
        return Step(self.net, self.optimizer, self.able, compiled=compiled)

    def start(self) -> "stepping.Eager | stepping.Captured":
        """The engine, started. Where compiling or capturing fails, the next simpler way, and it is said once."""
        train = self.recipe.train
        while True:
            try:
                if self.step.greedy is not None:  # the stage it is at decides what there is to capture
                    self.step.begin(self.done)
                return stepping.start(self.engine, self.step, self.data.train, train.batch, self.startup)
            except Exception as error:
                last = self.engine == "eager" or (not self.compiled and train.engine == "graph")
                if last or isinstance(error, NestlingError) or lacks_memory(error):
                    raise
                what, way = (
                    ("compiled", "uncompiled") if self.compiled else ("captured in a CUDA graph", "step by step")
                )
                say_once(f"the training step could not be {what} ({first_line(error)}); going on {way}, slower.")
                average = self.step.average
                self.step.close()
                self.engine = "graph" if self.compiled else "eager"
                self.step = self.make_step(compiled=False)
                self.step.average = average

    def epochs(self, beside: int = 1) -> Iterator[tuple[int, int]]:
        """Train to the end, yielding (epoch, step) as it goes, so that a caller can show progress or take turns.

        With a graph the next epoch is queued before the numbers of the last are back: neither this run nor any of those
        `beside` it (so many in all) waits for a log or a checkpoint to be written. Both come out as if they had waited.
        """
        with memory_explained(self.recipe, lambda: kept(self.run), beside), disk_explained(self.run):
            yield from self._epochs()

    def _epochs(self) -> Iterator[tuple[int, int]]:
        train = self.recipe.train
        if self.finished:
            return
        driver = self.start()
        self.stop.waits = True  # from here on there are epochs to lose
        self.steps = driver.steps
        ahead = self.engine == "graph" and not train.diagnostics  # diagnostics are of the newest step alone
        waiting: Ended | None = None
        for epoch in range(self.done, self.total):
            rates = epoch_rates(train, epoch % train.epochs, driver.steps)
            if (
                self.recipe.network.own or self.recipe.data.name == "own"
            ):  # dropout, loaders: what draws from torch itself
                torch.manual_seed(epoch_generator(train.seed, epoch).initial_seed())
            with driver.lane():  # the epoch before may still be going on: what changes now must wait for its end
                self.step.begin(epoch)
                began = Moment(self.device)
            for index in driver.epoch(epoch_generator(train.seed, epoch), rates):
                yield epoch, index
                if waiting is not None and (self.stop.asked or waiting.home.reached()):
                    self.record(waiting)
                    waiting = None
                if self.stop.asked:
                    self.keep()
                    return
            if waiting is not None:
                self.record(waiting)
            with driver.lane():
                waiting = self.close(epoch, rates[-1], began, averaged(driver.losses))
            over = self.time_is_up() or self.stop.asked
            if over or not ahead or epoch + 1 == self.total:
                self.record(waiting)
                waiting = None
            if over and not self.finished:
                self.keep()
                return

    @property
    def finished(self) -> bool:
        return self.done == self.total

    def close(self, epoch: int, rate: float, began: Moment, losses: Tensor) -> Ended:
        """Queue, behind an epoch's steps, all that has to be known of it: nothing here waits for the device."""
        train, done = self.recipe.train, epoch + 1
        trained = Moment(self.device)
        self.share_statistics()
        test: Tensor | None = None
        if self.main and (done == self.total or done % train.evaluate_every == 0):
            with self.step.average.applied() if self.step.average else nullcontext():
                found = self.examined = evaluate.examine(self.net, self.data.test, self.goal, train)
            test = leaving(torch.stack([found.errors, found.losses]))
        state = leaving_together(self.state()) if self.main else {}
        read = leaving(losses)
        return Ended(epoch, rate, began, trained, Moment(self.device), read, test, state)

    def record(self, ended: Ended) -> None:
        """One line in the log, then (so that a kill between the two loses nothing) the checkpoint."""
        ended.home.wait()
        train = self.recipe.train
        self.refuse_nan(ended.losses, ended.epoch)
        self.done = ended.epoch + 1
        if not self.main:
            return
        line: dict[str, Any] = {
            "epoch": self.done,
            "lr": ended.rate,
            "seconds": round(ended.seconds, 3),
            "images_per_second": round(len(ended.losses) * self.batch / ended.seconds, 1),
            "train_loss": [round(x, 6) for x in ended.losses.double().mean(0).tolist()],
        }
        if ended.test is not None:
            line["test_error"], line["test_loss"] = ([round(x, 6) for x in row] for row in ended.test.tolist())
        if train.diagnostics and self.step.report is not None:
            numbers = self.step.report.numbers()  # of the epoch's last step
            line["cosines"], line["weights"] = numbers["cosines"], numbers["weights"]
        self.run.append_log(line)
        self.newest = {**self.newest, **line}
        if self.board is not None:
            self.board.add(line)
        self.unsaved = ended.state
        if self.finished or self.done % train.checkpoint_every == 0:
            self.keep()

    # --- checkpoint ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Every tensor that training changes, by name."""
        names = dict(zip(self.net.parameters(), dict(self.net.named_parameters()), strict=True))
        found = {f"net.{key}": value for key, value in self.net.state_dict().items()}
        for parameter, state in self.optimizer.state.items():
            found |= {f"{key}.{names[parameter]}": value for key, value in state.items() if isinstance(value, Tensor)}
        if self.step.average:
            found |= {f"average.{key}": value for key, value in self.step.average.kept.items()}
        return found

    def keep(self) -> None:
        """Write a checkpoint of the epochs done, unless there is one."""
        if not self.unsaved:
            return
        broken = [name for name, tensor in self.unsaved.items() if not bool(torch.isfinite(tensor).all())]
        if broken:  # the last step of an epoch may do that, and its losses do not show it
            raise NestlingError(
                f"{broken[0]} is no finite number any more after epoch {self.done}; {self.last_saved()}. {REMEDY}"
            )
        self.run.save_checkpoint(self.unsaved, {"epoch": self.done, "recipe": dataclasses.asdict(self.recipe)})
        self.saved, self.unsaved = self.done, {}

    def restore(self) -> None:
        """Go on where the run's checkpoint stands; from the beginning if there is none yet."""
        if self.run.has(CHECKPOINT):
            tensors, meta = self.run.load_checkpoint()
            if not same_recipe(meta.get("recipe"), self.recipe):
                raise NestlingError(
                    f"{self.run.path / CHECKPOINT} belongs to another recipe than {self.run.path}/recipe.json; "
                    "restore the recipe it was made with, or delete the checkpoint to begin anew."
                )
            self.net.load_state_dict({k.removeprefix("net."): v for k, v in tensors.items() if k.startswith("net.")})
            for name, parameter in self.net.named_parameters():
                momentum = tensors.get(f"momentum_buffer.{name}")
                if momentum is not None:
                    like = torch.empty_like(parameter)  # the layout the optimizer would have chosen
                    self.optimizer.state[parameter]["momentum_buffer"] = like.copy_(momentum)
            if self.step.average:
                for key, kept in self.step.average.kept.items():
                    kept.copy_(tensors[f"average.{key}"])
            self.done = self.saved = int(meta["epoch"])
        if self.main:
            self.run.truncate_log(self.done)

    # --- several processes --------------------------------------------------------------------------------------

    def time_is_up(self) -> bool:
        """Ranks agree on it: one that stopped alone would leave the others waiting for it for ever."""
        over = time.monotonic() > self.until
        if group_of(True) is None or self.until == float("inf"):
            return over
        return bool(averaged(torch.tensor(float(over), device=self.device)))

    def share_statistics(self) -> None:
        """Ranks see different images: average the running statistics, so that all ranks end equal."""
        if self.recipe.train.micro_batches:  # after every step already
            return
        for buffer in self.net.buffers():
            if buffer.is_floating_point() and group_of(True) is not None:
                buffer.copy_(averaged(buffer))

    def refuse_nan(self, losses: Tensor, epoch: int) -> None:
        bad = torch.nonzero(~torch.isfinite(losses))
        if len(bad):
            step, task = bad[0].tolist()
            raise NestlingError(
                f"the loss of stage {task + 1} became {losses[step, task].item()} at step "
                f"{epoch * self.steps + step + 1} (epoch {epoch + 1}); {self.last_saved()}. {REMEDY}"
            )

    def last_saved(self) -> str:
        return f"the checkpoint of epoch {self.saved} is kept" if self.saved else "nothing was saved yet"

    def finish(self) -> dict[str, Any]:
        """Save the weights that were asked for (averaged ones, if so) and judge them."""
        with self.step.average.applied() if self.step.average else nullcontext(), disk_explained(self.run):
            if self.recipe.network.own:
                self.run.write_network(self.net)
            self.run.save_weights(self.net)
            split = "validation" if self.recipe.data.validation else "test"
            return evaluate.store(self.run, self.net, self.data, split, self.examined, self.recipe.train)


def main_rank() -> bool:
    """Whether this process writes the run folder: the only one, or the first of several."""
    return group_of(True) is None or dist.get_rank() == 0


def named_classes(data: DataSet, plan: Plan, goal: str) -> DataSet:
    """The data with names for their classes, numbers where they have none; they must be as many as the network answers with."""
    if goal == NUMBERS:
        return dataclasses.replace(data, classes=())
    count = plan.by_name[plan.heads[-1]].channels
    if count < 2:
        raise NestlingError(
            f"{plan.name} answers with one class, so that no answer could be wrong; build it for two and more, or hand over "
            "targets that are numbers: targets.float()"
        )
    for split in (data.train, data.test) if data.name == "own" else ():
        check_targets(split, goal, count)
    if not data.classes:
        return dataclasses.replace(data, classes=tuple(map(str, range(count))))
    if len(data.classes) != count:
        raise NestlingError(
            f"{plan.name} answers with {count} classes, the data have {len(data.classes)} ({', '.join(data.classes[:3])}, ...); "
            "build the network for these data"
        )
    return data


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """The randomness of one epoch, from the seed and its number alone: resuming needs no stored state."""
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch + 1)


def make_optimizer(net: torch.nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    """Plain SGD with momentum. On CUDA the rate is a tensor, so that a captured graph can read it."""
    train = recipe.train
    rate = torch.tensor(train.lr, device=device) if device.type == "cuda" else train.lr
    fused = True if device.type == "cuda" else None
    trained = [p for p in net.parameters() if p.requires_grad]
    if not trained:
        raise NestlingError(
            "all parameters of the network are frozen; let some train: net.requires_grad_(), or net.thaw()"
        )
    spared = [] if train.decay_norms else [p for p in trained if p.dim() < 2]
    decayed = [p for p in trained if train.decay_norms or p.dim() >= 2]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    return torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=rate,
        momentum=train.momentum,
        nesterov=train.nesterov and train.momentum > 0,
        weight_decay=train.weight_decay,
        fused=fused,
    )


def same_recipe(found: Any, recipe: Recipe) -> bool:
    """Whether a checkpoint's recipe, perhaps one written before some fields were there, is this one."""
    try:
        return from_dict(found) == recipe
    except NestlingError:
        return False


@contextmanager
def disk_explained(run: RunDir) -> Iterator[None]:
    """Add to an error for a full disk what is safe and how the run goes on."""
    try:
        yield
    except DiskFull as error:
        raise DiskFull(f"{error}. {kept(run)}") from error


def kept(run: RunDir) -> str:
    """What a run that stops now has in its folder, as a sentence."""
    if not run.has(CHECKPOINT):
        return "Nothing had been saved yet."
    return f"Nothing saved is lost: {run.going_on()} goes on from its last checkpoint."
