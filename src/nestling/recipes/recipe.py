"""What one run is: frozen dataclasses for the data, the network, the strategy and the training.

Comes in: field values, "key=value" overrides or JSON. Goes out: a Recipe whose every field has been checked.
A field's annotation is its whole rule (rules.py), so a recipe built in Python, by --set or from recipe.json meets the
same checks. Knows no network, data set or file by itself.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Annotated, Any, Literal

from nestling.errors import NestlingError, nearest
from nestling.files import from_text
from nestling.recipes.idle import why_idle
from nestling.recipes.rules import (
    AboveZero,
    Amount,
    Bounds,
    Count,
    OneOf,
    Positive,
    RecipeSection,
    Share,
    hints,
    parsed,
    show,
)
from nestling.recipes.strategies import STRATEGIES


@dataclass(frozen=True)
class DataRecipe(RecipeSection):
    """The images of a run: which data set, from where, and what is held out."""

    name: Literal["digits", "cifar10", "tiny-imagenet", "folder", "synthetic", "own"] = "digits"
    root: str = ""  # where the files are; empty = the data set's usual place. own: the function that gives the data
    validation: Count = 0  # images held out of training; > 0 = evaluate on them instead of the test split
    limit: Count = 0  # only the first N training images of the fixed shuffle; 0 = all
    augment: bool = True
    cutmix: Share = 0.0  # share of training images into which a box of another image is pasted
    size: Annotated[int, Bounds(least=1, most=8192)] = 224  # folder only: side of the crop
    workers: Count = 2  # folder only: reading processes
    skip_unreadable: bool = False  # folder only: skip images that cannot be read instead of stopping

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cutmix and (self.name == "folder" or not self.augment):
            raise NestlingError(
                f"data.cutmix is {self.cutmix:g}, which needs data.augment and images that lie in memory; "
                f"found data.name={self.name}, data.augment={self.augment}: leave data.cutmix out"
            )


@dataclass(frozen=True)
class NetworkRecipe(RecipeSection):
    """The network of a run: a nest by name, the independent net of one stage's size, or an ensemble."""

    name: str = "width-digits"  # one of ours, or the function that builds your own, such as my_file.py:build
    way: str = ""  # how your own module becomes anytime, such as exits(at=(0.25, 0.5)); empty = its function did that
    alone: Count = 0  # 0 = the nest; s = a network of stage s's size by itself, fully connected
    ensemble: bool = False  # independent networks of rising size, run one after another
    growth: str = ""  # order of growing, such as "w,d,w,d"; empty here and below = the network's own
    stripes: tuple[Positive, ...] = ()
    widths: tuple[Positive, ...] = ()
    blocks: tuple[Positive, ...] = ()
    # own: each stage its linear layer; added: its logits are added to the answer before; hidden: with a hidden layer
    heads: Literal["own", "added", "hidden"] = "own"
    early: tuple[AboveZero, ...] = ()  # how wide the stages before a network that is kept are, as shares of its width
    keep: str = ""  # folder of the run in which that network was trained
    early_from: str = (
        ""  # folder of a nest whose first stages they start as; empty = copies of the kept network's channels
    )
    early_widths: tuple[
        Positive, ...
    ] = ()  # how wide they are together, group by group; empty = their shares of its width

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.keep) != bool(self.early):
            raise NestlingError(
                "network.keep and network.early belong together: the run whose network is kept, and how wide the stages before "
                "it are, as shares of its width; set both, such as network.keep=RUN network.early=0.25,0.25"
            )
        if self.early_from and not self.early:
            raise NestlingError(
                "network.early_from says what stages before a kept network start as; set network.keep and network.early, too"
            )
        if self.early_widths and not self.early_from:
            raise NestlingError(
                "network.early_widths is for stages that begin as those of another nest, and says how wide they are together; "
                "set network.early_from, too, or leave it out: copies of a network's channels have shares of its width"
            )
        if self.early and (self.alone or self.ensemble):
            raise NestlingError(
                "network.early stands before the whole network: leave network.alone and network.ensemble out"
            )

    def without_early(self) -> "NetworkRecipe":
        """The network by itself, without stages before it."""
        return replace(self, early=(), keep="", early_from="", early_widths=())

    @property
    def own(self) -> bool:
        """Whether a function of the user's builds it."""
        return ":" in self.name


@dataclass(frozen=True)
class StrategyRecipe(RecipeSection):
    """How the tasks' gradients become one update: the combiner by name, and its settings."""

    name: Annotated[str, OneOf(STRATEGIES)] = "osgd"
    # Stage numbers, most important first; empty = 1, 2, ..., n. Several orders one after another (1,2,3,3,2,1) share the
    # epochs equally: the order then changes over time.
    order: tuple[Positive, ...] = ()
    scope: Literal["all", "shared", "block", "tensor"] = "all"  # which parameters one projection sees
    # One per stage; empty = all 1. Several one after another (0,0,1,1,1,1) share the epochs equally, as orders do.
    importance: tuple[Amount, ...] = ()
    refresh: Positive = 1  # recompute the combination's weights every k steps, and as an epoch begins
    constant: AboveZero = 0.5  # normsgd and osgd-norm: the paper's C, the norm that the largest task's gradient gets
    damping: Share = 0.0  # damped: the share of later losses in the training of weights born earlier
    literal: bool = False  # the paper's own sqrt(d_s) * C, about a hundred times as large: lower the constant with it

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({self.order.count(stage) for stage in self.order}) > 1:
            raise NestlingError(
                f"strategy.order names a stage twice: {show(self.order)}; name each stage once, or write several whole "
                "orders one after another"
            )


@dataclass(frozen=True)
class TrainRecipe(RecipeSection):
    """Epochs, optimizer, schedule, precision, device and seed of a run."""

    epochs: Count = 200
    batch: Positive = 128
    lr: AboveZero = 0.1
    momentum: Share = 0.9
    nesterov: bool = True
    weight_decay: Amount = 5e-4
    decay_norms: bool = True  # false: weight decay spares the scales and shifts of norms, and biases
    sync_norms: bool = False  # several ranks: batch norms see the whole batch, not only their rank's share
    micro_batches: Count = (
        0  # equal parts of a batch, each with norms of its own, shared by any number of ranks; 0 = one each
    )
    schedule: Literal["step", "cosine"] = "step"
    milestones: tuple[Positive, ...] = (60, 120, 160)  # step only: epochs at which lr is multiplied by gamma
    gamma: AboveZero = 0.2
    warmup: Count = 0  # epochs of linearly rising lr
    clip: Amount = 0.0  # largest gradient norm; 0 = no clipping
    smoothing: Share = 0.0  # label smoothing
    distill: Share = (
        0.0  # weight of soft targets: the last stage's in the earlier ones' losses, or the teacher's in all
    )
    teacher: str = ""  # a trained run whose last stage gives the soft targets, or a function that gives a module
    loss: str = ""  # your own function of output and target; empty = cross-entropy of classes, squared error of numbers
    error: str = ""  # your own function of all outputs and targets: the error of each sample from 0 to 1
    teaches: Literal["all", "last"] = "all"  # whom the teacher teaches; last: the last stage, which teaches the others
    distill_temperature: AboveZero = 2.0
    average: Share = 0.0  # decay of the moving average of weights; 0 = none
    precision: Literal["float32", "bfloat16"] = "float32"
    channels_last: bool = True
    engine: Literal["auto", "eager", "graph"] = "auto"
    compile: bool = True  # engine graph only: fuse small operations, by kernels of our own or by torch.compile
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: Count = 0
    evaluate_every: Positive = 1  # epochs
    checkpoint_every: Positive = 1  # epochs
    diagnostics: bool = False  # log task-gradient cosines and combination weights
    tensorboard: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.milestones) != sorted(set(self.milestones)):
            raise NestlingError(f"train.milestones must rise, found {show(self.milestones)}; sort them")
        if self.micro_batches and (self.sync_norms or self.batch % self.micro_batches):
            found = "train.sync_norms=true" if self.sync_norms else f"train.batch={self.batch}"
            raise NestlingError(
                f"found train.micro_batches={self.micro_batches} with {found}; expected equal parts of a batch, each with "
                "statistics of its own: leave train.sync_norms out, and let the batch be a multiple"
            )
        if self.teacher and not self.distill:
            raise NestlingError(
                f"train.teacher is {self.teacher} but train.distill is 0, so that nothing would be learnt from it; "
                "set train.distill, such as 0.5, or leave the teacher out"
            )


@dataclass(frozen=True)
class Recipe(RecipeSection):
    """One run: data, network, strategy and training, every field checked."""

    name: str
    data: DataRecipe = field(default_factory=DataRecipe)
    network: NetworkRecipe = field(default_factory=NetworkRecipe)
    strategy: StrategyRecipe = field(default_factory=StrategyRecipe)
    train: TrainRecipe = field(default_factory=TrainRecipe)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy.name == "greedy":
            given = {"strategy.order": self.strategy.order, "strategy.importance": self.strategy.importance}
            inner = 0.0 if self.train.teacher and self.train.teaches == "all" else self.train.distill
            for key, value in {**given, "train.distill": inner}.items():
                if value:
                    raise NestlingError(
                        f"{key} is {show(value)} with strategy.name=greedy, which trains one stage at a time and has no "
                        f"use for it; leave {key} out, or choose another strategy"
                    )


def keys() -> dict[str, Any]:
    """Every key that --set accepts ("train.epochs", ...), with its annotation."""
    found: dict[str, Any] = {}
    for name, hint in hints(Recipe).items():
        if dataclasses.is_dataclass(hint):
            found |= {f"{name}.{inner}": inner_hint for inner, inner_hint in hints(hint).items()}
        else:
            found[name] = hint
    return found


def flat(recipe: Recipe) -> dict[str, Any]:
    """Every key that --set accepts, with the recipe's own value."""
    return {key: attrgetter(key)(recipe) for key in keys()}


def refuse_idle(settings: Iterable[str], recipes: Sequence[Recipe]) -> None:
    """Refuse settings that mean nothing in any of the recipes that have them."""
    usual = flat(Recipe("usual"))
    for key in dict.fromkeys(map(key_of, settings)):
        whys = [why_idle(recipe, key) for recipe in recipes if flat(recipe)[key] != usual[key]]
        if whys and all(whys):
            raise NestlingError(f"{key} would have no effect: {whys[0]}; leave it out, or change that, too")


def key_of(setting: str) -> str:
    return setting.partition("=")[0].strip().replace("-", "_")


def override(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """The recipe with "key=value" settings applied; of two for one key the later counts."""
    valid = keys()
    changes: dict[str, dict[str, Any]] = {}  # section ("" = the recipe itself) -> its new values
    for setting in settings:
        _, equals, text = setting.partition("=")
        key = key_of(setting)
        if not equals:
            raise NestlingError(f"setting {setting!r} has no '='; write key=value, such as train.epochs=3")
        if key not in valid:
            raise NestlingError(
                f"unknown key {key!r} in setting {setting!r}; did you mean {nearest(key, valid)}? "
                "(nestling describe RECIPE lists all)"
            )
        section, _, name = key.rpartition(".")
        changes.setdefault(section, {})[name] = parsed(text.strip(), valid[key], key)
    # All at once, so that fields which must agree with each other may be set in any order.
    whole = changes.pop("", {})
    parts = {name: dataclasses.replace(getattr(recipe, name), **new) for name, new in changes.items()}
    return dataclasses.replace(recipe, **whole, **parts)


def from_json(text: str) -> Recipe:
    """The recipe of a recipe.json; unknown, missing or wrong fields raise NestlingError."""
    try:
        found = from_text(text)
    except ValueError as error:
        raise NestlingError(f"the recipe is not JSON ({error}); expected a recipe.json of a run") from error
    return from_dict(found)


def from_dict(found: Any) -> Recipe:
    sections: dict[str, Any] = {name: hint for name, hint in hints(Recipe).items() if dataclasses.is_dataclass(hint)}
    whole = exact_fields(found, Recipe, "the recipe")
    parts = {name: kind(**exact_fields(whole[name], kind, f"{name!r}")) for name, kind in sections.items()}
    return Recipe(**{**whole, **parts})


# Fields that recipes written before them lack; their defaults are what was done then.
LATER = {
    "decay_norms", "teacher", "teaches", "constant", "literal", "damping", "way", "loss", "error", "early", "keep", "cutmix",
    "sync_norms", "early_from", "early_widths", "micro_batches", "heads",
}  # fmt: skip

# Fields that do not change what a run learns, or only by chance: runs that differ in nothing else are one line.
CHANCE = {
    "name", "train.seed", "train.device", "train.engine", "train.compile", "train.tensorboard", "train.diagnostics",
    "train.evaluate_every", "train.checkpoint_every", "data.root", "data.workers",
}  # fmt: skip


def exact_fields(found: Any, kind: Any, what: str) -> dict[str, Any]:
    """found, if it is a mapping with exactly the fields of kind; those that came later may be missing."""
    expected = set(hints(kind))
    if not isinstance(found, dict):
        raise NestlingError(f"{what} should be a JSON object with fields {', '.join(hints(kind))}; found {found!r}")
    if unknown := sorted(set(found) - expected):
        raise NestlingError(
            f"{what} has an unknown field {unknown[0]!r}; did you mean {nearest(unknown[0], expected)}? "
            "(it may come from another version of nestling)"
        )
    if missing := sorted(expected - set(found) - LATER):
        raise NestlingError(
            f"{what} lacks the field(s) {', '.join(missing)}; "
            "it is incomplete or comes from another version of nestling"
        )
    return found
