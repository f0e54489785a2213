"""Your own network from beginning to end: `fit` trains a nest on your data, judges it and leaves a run folder like any other.

In: a nested network or the function that builds it, data, and whatever of the recipe should be otherwise. Out: the run, with
results, and, where a teacher was given, its error and time beside those of the stages. The loop is train/'s.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nestling.data import DATASETS
from nestling.data.own import is_pictures
from nestling.errors import NestlingError
from nestling.files import PROFILE, RECIPE, RESULTS
from nestling.nets import NestedNet
from nestling.nets.extended import Extended
from nestling.recipes.code import UserFunction, hand_object, hand_over
from nestling.recipes.recipe import (
    DataRecipe,
    NetworkRecipe,
    Recipe,
    StrategyRecipe,
    TrainRecipe,
    override,
    refuse_idle,
)
from nestling.runs.folder import RunDir
from nestling.runs.open import OpenedRun, resolve
from nestling.studies.original import at_hand, judged
from nestling.studies.profile import profile
from nestling.train.loop import main_rank
from nestling.train.run import train as train_recipe

Loss = Callable[[Tensor, Tensor], Tensor]


def fit(
    net: NestedNet | UserFunction | str,
    train: Any,
    test: Any = None,
    *,
    teacher: "nn.Module | UserFunction | str | Path | None" = None,
    loss: Loss | str | None = None,
    error: Loss | str | None = None,
    out: str | Path = "runs/mine",
    epochs: int = 20,
    batch: int = 64,
    lr: float = 0.05,
    strategy: str = "osgd",
    way: str = "",
    build: UserFunction | str | None = None,
    set: Sequence[str] | str = (),
    resume: bool = False,
    seconds: float = inf,
    quiet: bool = False,
    repeats: int = 100,
    command: str = "nestling.fit",
) -> OpenedRun:
    """Train a network of your own into a run folder, and judge it there.

    net: a nested network (from `nest`, `keep`, `exits`; it is trained in place), or the function that builds it, or its name
        (`my_file.py:build`). A function is what other processes build it with: with a network say it by `build`. Where it
        gives a plain module, `way` nests it: 'exits(at=(0.25, 0.5))'.
    train, test: a DataLoader, a Dataset, or (inputs, targets) tensors each; or, alone, the name of a data set, a folder of
        pictures (train/CLASS, val/CLASS), a function that gives both, or its name.
    teacher: a module to learn from (with train.distill, 0.5 unless set), or a run's folder. Report and results show it, too.
    loss: of output and target, a mean over the batch; cross-entropy of classes and squared error of numbers if not given.
    error: of all outputs and targets, the error of each sample from 0 to 1, where they are neither classes nor numbers to hit.
    set: any field of the recipe, such as ("train.weight_decay=0", "strategy.order=3,2,1"), or a single one as text.
    repeats: how often the stages (and the teacher) are timed afterwards, for the report; 0 = not.
    resume: go on with the run in `out`, which was stopped, by its own recipe.
    """
    if isinstance(train, DataLoader) and train.batch_size:
        batch = train.batch_size
    before = RunDir.open(out).read_recipe() if resume else None
    recipe = Recipe(
        name=Path(out).name,
        data=data_recipe(train, test, net, before.data.root if before else ""),
        network=NetworkRecipe(name=network_name(net, build, before.network.name if before else ""), way=way),
        strategy=StrategyRecipe(name=strategy),
        train=TrainRecipe(
            epochs=epochs, batch=batch, lr=lr, schedule="cosine", channels_last=False,
            loss=hand_over(loss, before.train.loss if before else "") if loss else "",
            error=hand_over(error, before.train.error if before else "") if error else "",
            **taught_by(teacher, before.train.teacher if before else ""),
        ),
    )  # fmt: skip
    settings = (set,) if isinstance(set, str) else set
    recipe = override(before or recipe, settings)
    refuse_idle(settings, [recipe])
    if isinstance(train, DataLoader) and train.batch_size and train.batch_size != recipe.train.batch:
        raise NestlingError(
            f"train.batch is {recipe.train.batch}, and the training loader's batches are of {train.batch_size}, which is what "
            "counts; make the loader with another batch_size"
        )
    warn_of_pictures(net, train)
    with torch.random.fork_rng():  # training seeds torch for every epoch
        found = train_recipe(recipe, str(out), resume, command, quiet, seconds)
    run = resolve(OpenedRun(out))
    if isinstance(net, NestedNet):
        hand_over(lambda: copy.deepcopy(net), recipe.network.name)  # from now on it is opened, not trained
        if found:
            run.load_weights(net)
    if not found or not main_rank():
        return run
    if at_hand(recipe) and "teacher" not in run.results:
        run.write_json(RESULTS, {**found, "teacher": judged(recipe)})
        del run.results
    if repeats and not run.has(PROFILE):
        profile(str(out), recipe.train.device, repeats=repeats)
    return run


def warn_of_pictures(net: object, train: object) -> None:
    """Pictures are normalised here, and layers that stay as they are may know other numbers."""
    if isinstance(net, Extended) and net._held and is_pictures(train):
        warnings.warn(
            "these uint8 images are normalised by their own mean and deviation, and your network's own layers stay as they are: "
            "if they were trained on other numbers (pixels / 255, say), their answer is spoilt; hand over float32 images as they "
            "take them",
            stacklevel=3,
        )


def network_name(net: NestedNet | UserFunction | str, build: UserFunction | str | None, before: str) -> str:
    """What the recipe calls it: the function that builds it. A network at hand is trained itself."""
    if not isinstance(net, NestedNet):
        if isinstance(net, nn.Module) and any(isinstance(each, NestedNet) for each in net.modules()):
            raise NestlingError(
                f"found a {type(net).__name__} around a nested network; hand over the network itself, its .module or ._orig_mod"
            )
        if isinstance(net, nn.Module):
            raise NestlingError(
                f"found a plain {type(net).__name__}; make it anytime first, such as nestling.exits(module), or hand over the "
                "function that builds it and way="
            )
        if build is not None:
            raise NestlingError("build is for a network that is at hand; net itself names the function here")
        return hand_over(net, before)
    if build is not None:
        return hand_over(lambda: net, hand_over(build, before))
    return hand_object(net, net.plan.name.replace(":", " "), before)


def data_recipe(train: Any, test: Any, net: Any, before: str) -> DataRecipe:
    if test is not None:
        return DataRecipe(name="own", root=hand_object((train, test), "data", before))
    if callable(train) and not isinstance(train, str):
        return DataRecipe(name="own", root=hand_over(train, before))
    if isinstance(train, str | Path):
        if str(train) in DATASETS:
            return DataRecipe(name=str(train))  # type: ignore[arg-type]  # it is in DATASETS
        if Path(train).is_dir():
            sides = net.plan.input.size if isinstance(net, NestedNet) else ()
            size = sides[-1] if sides else DataRecipe.size
            return DataRecipe(name="folder", root=str(train), size=size)
        if ":" in str(train):
            return DataRecipe(name="own", root=hand_over(str(train), before))
    found = train if isinstance(train, str) else f"a {type(train).__name__}"
    raise NestlingError(
        f"found {found} and no test data; expected training and test data, a folder of pictures, a function that gives both, or "
        f"one of {', '.join(name for name in DATASETS if name != 'own')}"
    )


def taught_by(teacher: "nn.Module | UserFunction | str | Path | None", before: str) -> dict[str, Any]:
    """The recipe's fields about a teacher."""
    if teacher is None:
        return {}
    if isinstance(teacher, nn.Module):
        return {"teacher": hand_object(teacher, "teacher", before), "distill": 0.5}
    if isinstance(teacher, str | Path):
        teacher = str(teacher)
        folder = (Path(teacher) / RECIPE).is_file() or ":" not in teacher
        return {"teacher": teacher if folder else hand_over(teacher, before), "distill": 0.5}
    return {"teacher": hand_over(teacher, before), "distill": 0.5}
