"""Training: a recipe becomes a run folder. Any network of the registry, any strategy, resumable at every epoch.

In: a recipe and a folder. Out: weights, log, results and a checkpoint in that folder. Everything random comes from the
recipe's seed and the number of the epoch, so a resumed run goes on bit for bit (on a CPU). What happens to a batch is
step.py's business, how batches are driven is engine.py's; reports are made elsewhere, from the folder alone.
"""

import dataclasses
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from nestling import evaluate
from nestling.data import DataSet, load
from nestling.errors import NestlingError
from nestling.gradients.reduce import group_of
from nestling.nets import build
from nestling.recipe import Recipe, override
from nestling.recipes import named
from nestling.rundir import CHECKPOINT, RESULTS, RunDir
from nestling.train import engine, progress
from nestling.train.board import Board
from nestling.train.schedule import epoch_rates
from nestling.train.step import Step


def pick_device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise NestlingError("train.device=cuda, but torch sees no CUDA device here; use train.device=auto or cpu.")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


class Training:
    """One run in progress. `epochs()` does the work; everything that has to survive a kill goes through `run`."""

    def __init__(self, recipe: Recipe, run: RunDir, data: DataSet | None = None, until: float = float("inf")) -> None:
        """`until`: a moment of time.monotonic() after which to stop, with a checkpoint, at the end of an epoch."""
        self.recipe, self.run, self.until = recipe, run, until
        self.device = pick_device(recipe.train.device)
        self.data = data or load(recipe.data, self.device)
        seed = torch.Generator().manual_seed(recipe.train.seed)
        net = build(recipe.network, classes=len(self.data.classes), shape=self.data.shape, generator=seed)
        memory = torch.channels_last if recipe.train.channels_last else torch.contiguous_format
        self.net = net.to(self.device, memory_format=memory).train()  # type: ignore[call-overload]
        self.optimizer = make_optimizer(self.net, recipe, self.device)
        self.engine = engine.kind(recipe, self.device, self.data.train)
        self.step = Step(self.net, self.optimizer, recipe, compiled=self.engine == "graph" and recipe.train.compile)
        # Greedy training gives every stage the recipe's epochs, one stage after another.
        self.total = recipe.train.epochs * (len(net.plan.heads) if self.step.greedy else 1)
        self.done = 0  # epochs
        self.newest: dict[str, Any] = {}  # line of the log
        self.answers: tuple[Tensor, Tensor] | None = None  # the newest logits and labels of the test split
        self.board = Board(run.path) if recipe.train.tensorboard else None
        self.main = main_rank()

    def epochs(self) -> Iterator[tuple[int, int]]:
        """Train to the end, yielding (epoch, step) as it goes, so that a caller can show progress or take turns."""
        train = self.recipe.train
        driver = engine.start(self.engine, self.step, self.data.train, train.batch)
        self.steps = driver.steps
        for epoch in range(self.done, self.total):
            started = time.perf_counter()
            self.step.begin(epoch)
            rates = epoch_rates(train, epoch % train.epochs, driver.steps)
            for index in driver.epoch(epoch_generator(train.seed, epoch), rates):
                yield epoch, index
            losses = averaged(driver.losses).cpu()  # the only wait for the device in an epoch
            seconds = time.perf_counter() - started
            self.refuse_nan(losses, epoch, driver.steps)
            self.done = epoch + 1
            self.share_statistics()
            if self.main:
                self.record(epoch, rates[-1], losses, seconds)
            if time.monotonic() > self.until and not self.finished:
                if self.main:
                    self.save()
                return

    @property
    def finished(self) -> bool:
        return self.done == self.total

    def record(self, epoch: int, rate: float, losses: Tensor, seconds: float) -> None:
        """One line in the log, then (so that a kill between the two loses nothing) the checkpoint."""
        train = self.recipe.train
        last = self.finished
        line: dict[str, Any] = {
            "epoch": self.done,
            "lr": rate,
            "seconds": round(seconds, 3),
            "images_per_second": round(len(losses) * train.batch / seconds, 1),
            "train_loss": [round(x, 6) for x in losses.double().mean(0).tolist()],
        }
        if last or self.done % train.evaluate_every == 0:
            with self.step.average.applied() if self.step.average else nullcontext():
                logits, labels = self.answers = evaluate.answers(self.net, self.data.test)
            line["test_error"] = [round(x, 6) for x in evaluate.errors(logits, labels).tolist()]
            line["test_loss"] = [round(float(torch.nn.functional.cross_entropy(stage, labels)), 6) for stage in logits]
        if train.diagnostics and self.step.report is not None:
            numbers = self.step.report.numbers()  # of the epoch's last step
            line["cosines"], line["weights"] = numbers["cosines"], numbers["weights"]
        self.run.append_log(line)
        self.newest = {**self.newest, **line}
        if self.board is not None:
            self.board.add(line)
        if last or self.done % train.checkpoint_every == 0:
            self.save()

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

    def save(self) -> None:
        self.run.save_checkpoint(self.state(), {"epoch": self.done, "recipe": dataclasses.asdict(self.recipe)})

    def restore(self) -> None:
        """Go on where the run's checkpoint stands; from the beginning if there is none yet."""
        if self.run.has(CHECKPOINT):
            tensors, meta = self.run.load_checkpoint()
            if meta.get("recipe") != as_json(dataclasses.asdict(self.recipe)):
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
            self.done = int(meta["epoch"])
        if self.main:
            self.run.truncate_log(self.done)

    # --- several processes --------------------------------------------------------------------------------------

    def share_statistics(self) -> None:
        """Ranks see different images: average the running statistics, so that all ranks end equal."""
        group = group_of(True)
        if group is not None:
            for buffer in self.net.buffers():
                if buffer.is_floating_point():
                    dist.all_reduce(buffer, group=group)
                    buffer /= group.size()

    def refuse_nan(self, losses: Tensor, epoch: int, steps: int) -> None:
        bad = torch.nonzero(~torch.isfinite(losses))
        if len(bad):
            step, task = bad[0].tolist()
            kept = (
                f"the checkpoint of epoch {self.done} is kept" if self.run.has(CHECKPOINT) else "nothing was saved yet"
            )
            raise NestlingError(
                f"the loss of stage {task + 1} became {losses[step, task].item()} at step {epoch * steps + step + 1} "
                f"(epoch {epoch + 1}); {kept}. Lower train.lr, set train.clip, or use strategy.name=osgd-norm."
            )

    def finish(self) -> dict[str, Any]:
        """Save the weights that were asked for (averaged ones, if so) and judge them."""
        with self.step.average.applied() if self.step.average else nullcontext():
            self.run.save_weights(self.net)
            split = "validation" if self.recipe.data.validation else "test"
            return evaluate.store(self.run, self.net, self.data, split, self.answers)


def as_json(value: Any) -> Any:
    """A value as it comes back from JSON: tuples are lists there."""
    if isinstance(value, dict):
        return {key: as_json(inner) for key, inner in value.items()}
    return [as_json(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def main_rank() -> bool:
    """Whether this process writes the run folder: the only one, or the first of several."""
    return group_of(True) is None or dist.get_rank() == 0


def averaged(losses: Tensor) -> Tensor:
    group = group_of(True)
    if group is not None:
        losses = losses.clone()
        dist.all_reduce(losses, group=group)
        losses /= group.size()
    return losses


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """The randomness of one epoch, from the seed and its number alone: resuming needs no stored state."""
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch + 1)


def make_optimizer(net: torch.nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    """Plain SGD with momentum. On CUDA the rate is a tensor, so that a captured graph can read it."""
    train = recipe.train
    rate = torch.tensor(train.lr, device=device) if device.type == "cuda" else train.lr
    fused = True if device.type == "cuda" else None
    return torch.optim.SGD(
        net.parameters(),
        lr=rate,
        momentum=train.momentum,
        nesterov=train.nesterov and train.momentum > 0,
        weight_decay=train.weight_decay,
        fused=fused,
    )


def prepare(
    recipe: Recipe,
    path: str,
    resume: bool,
    command: str,
    data: DataSet | None = None,
    until: float = float("inf"),
) -> Training | None:
    """A Training over its run folder, new or resumed; None when the run is finished already."""
    main = main_rank()
    run = RunDir.open(path) if resume else RunDir.create(path) if main else RunDir(path)
    if resume:
        found = run.read_recipe()
        if found != recipe:
            raise NestlingError(
                f"{run.path} was trained with another recipe ({first_difference(found, recipe)}); "
                "resume with the recipe it began with, or train into a new folder."
            )
        if run.has(RESULTS):
            return None
    elif main:
        run.write_recipe(recipe)
    training = Training(recipe, run, data, until)
    if main:
        run.write_provenance(command, str(training.device), resumed=resume)
    if resume:
        training.restore()
    return training


def first_difference(found: Recipe, given: Recipe) -> str:
    old, new = (flat(dataclasses.asdict(each)) for each in (found, given))
    key = next(key for key in old if old[key] != new[key])
    return f"{key} was {old[key]!r}, now {new[key]!r}"


def flat(tree: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return found


def train(
    recipe: Recipe,
    path: str,
    resume: bool = False,
    command: str = "nestling.train",
    quiet: bool = False,
    seconds: float = float("inf"),
) -> dict[str, Any]:
    """Train one recipe into a run folder (or go on with it) and return its results; {} if time was up before."""
    until = time.monotonic() + seconds
    join_ranks()
    training = prepare(recipe, path, resume, command, until=until)
    if training is None:
        return dict(RunDir.open(path).read_json(RESULTS))
    with progress.bar(recipe.name, quiet or not training.main) as shown:
        for epoch, index in training.epochs():
            shown(training, epoch, index)
    found = training.finish() if training.main and training.finished else {}
    if dist.is_initialized():
        dist.barrier()  # the others wait for the one that evaluates
    return found


def train_side_by_side(
    recipes: list[tuple[Recipe, str]], command: str = "nestling.train", seconds: float = float("inf")
) -> list[dict[str, Any]]:
    """Several runs in one process on one GPU, taking turns step by step: small networks do not fill a chip alone.

    Each run is what it would be alone: runs share the data in memory and nothing else. Runs that were begun go on. After
    `seconds` all of them stop at the end of the epoch with a checkpoint, to be gone on with in another call. Returns the
    results of the runs that are finished.
    """
    until = time.monotonic() + seconds
    trainings = []
    data: dict[Any, DataSet] = {}
    for recipe, path in recipes:
        begun = RunDir(path).has("recipe.json")
        key = (recipe.data, recipe.train.device)
        if key not in data:
            data[key] = load(recipe.data, pick_device(recipe.train.device))
        trainings.append(prepare(recipe, path, begun, command, data[key], until))
    turns = [(training, training.epochs()) for training in trainings if training is not None]
    with progress.bar(f"{len(turns)} runs", quiet=False) as shown:
        while turns:
            for training, turn in list(turns):
                at = next(turn, None)
                if at is None:
                    if training.finished:
                        training.finish()
                    turns = [other for other in turns if other[0] is not training]
                elif training is turns[0][0]:
                    shown(training, *at)
    runs = [RunDir.open(path) for _, path in recipes]
    return [dict(run.read_json(RESULTS)) for run in runs if run.has(RESULTS)]


def join_ranks() -> None:
    """Join the other processes when started by torchrun."""
    if dist.is_available() and dist.is_torchelastic_launched() and not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def command(
    recipe: str, out: str = "", set: tuple[str, ...] = (), resume: str = "", minutes: float = 0.0, quiet: bool = False
) -> dict[str, Any]:
    """Train a recipe into a run folder, or go on with one that was stopped.

    Args:
        recipe: a recipe's name, or a recipe.json.
        out: the run's folder; by default runs/RECIPE.
        set: change a field, key=value, for example train.epochs=3; may be repeated.
        resume: the folder of a run to go on with.
        minutes: stop at the end of an epoch after so many minutes, to be resumed later; 0 means never.
        quiet: no progress bar.
    """
    chosen = override(named(recipe), set)
    path = resume or out or f"runs/{chosen.name}"
    words = " ".join(["nestling train", recipe, *(f"--set {each}" for each in set)])
    seconds = 60 * minutes if minutes else float("inf")
    found = train(chosen, path, bool(resume), words, quiet, seconds)
    spectator = dist.is_torchelastic_launched() and os.environ.get("RANK") != "0"
    return {} if spectator else {"run": path, **found}


def show(result: dict[str, Any]) -> Table:
    if "stages" in result:
        return evaluate.show(result)
    return Table(f"stopped when time was up; go on with --resume {result['run']}")
