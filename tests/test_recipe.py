"""Recipes: defaults, overrides with their types, messages for bad input, and JSON there and back."""

import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.errors import NestlingError, nearest
from nestling.recipes.idle import COMBINERS, RULES
from nestling.recipes.recipe import (
    DataRecipe,
    NetworkRecipe,
    Recipe,
    StrategyRecipe,
    TrainRecipe,
    from_dict,
    from_json,
    keys,
    override,
    refuse_idle,
)

RECIPE = Recipe("plain")


def at(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("train.epochs=3", 3),
        ("train.epochs = 3", 3),
        ("train.lr=1e-3", 0.001),
        ("train.lr=1", 1.0),
        ("train.nesterov=false", False),
        ("train.nesterov=Yes", True),
        ("train.weight-decay=0", 0.0),
        ("train.schedule=cosine", "cosine"),
        ("train.milestones=", ()),
        ("strategy.order=3,1,2", (3, 1, 2)),
        ("strategy.order=(3, 1, 2)", (3, 1, 2)),
        ("strategy.importance=1,0.5", (1.0, 0.5)),
        ("data.root=/some/where=odd", "/some/where=odd"),
        ("name=mine", "mine"),
    ],
)
def test_an_override_sets_one_field_with_its_type(setting: str, value: Any) -> None:
    key = setting.partition("=")[0].strip().replace("-", "_")
    changed = override(RECIPE, [setting])
    assert at(changed, key) == value
    assert type(at(changed, key)) is type(value)
    unchanged = {other: at(RECIPE, other) for other in keys() if other != key}
    assert {other: at(changed, other) for other in unchanged} == unchanged


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.epoch=3", ["unknown key 'train.epoch'", "train.epochs", "(nestling describe RECIPE lists all)"]),
        ("epochs=3", ["unknown key 'epochs'", "train.epochs"]),
        ("trian.lr=3", ["unknown key 'trian.lr'", "train.lr"]),
        ("train=3", ["unknown key 'train'", "train."]),
        ("train.epochs", ["no '='", "key=value"]),
        ("train.epochs=3.5", ["train.epochs is '3.5'", "whole number", "at least 0"]),
        ("train.epochs=-1", ["train.epochs is -1", "at least 0"]),
        ("train.epochs=", ["train.epochs is ''", "whole number"]),
        ("train.batch=0", ["train.batch is 0", "at least 1"]),
        ("train.lr=0", ["train.lr is 0", "above 0"]),
        ("train.lr=nan", ["train.lr is nan", "above 0"]),
        ("train.lr=inf", ["train.lr is inf"]),
        ("train.momentum=1.5", ["train.momentum is 1.5", "at most 1"]),
        ("train.nesterov=maybe", ["train.nesterov is 'maybe'", "true or false"]),
        ("train.precision=float23", ["train.precision is 'float23'", "float32"]),
        ("strategy.name=ogsd", ["strategy.name is 'ogsd'", "osgd", "greedy"]),
        ("strategy.order=1,x", ["strategy.order is 'x'", "whole number"]),
        ("strategy.order=0,1", ["strategy.order is 0", "at least 1"]),
        ("strategy.order=2,1,2", ["strategy.order names a stage twice", "2,1,2"]),
        ("train.milestones=60,30", ["train.milestones must rise", "60,30"]),
    ],
)
def test_a_bad_override_says_what_was_found_and_what_is_valid(setting: str, words: list[str]) -> None:
    with pytest.raises(NestlingError) as caught:
        override(RECIPE, [setting])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "build",
    [
        lambda: TrainRecipe(epochs=-1),
        lambda: TrainRecipe(epochs=True),
        lambda: TrainRecipe(lr="fast"),  # type: ignore[arg-type]
        lambda: StrategyRecipe(name="adam"),
        lambda: StrategyRecipe(order=3),  # type: ignore[arg-type]
        lambda: DataRecipe(validation=-5),
        lambda: NetworkRecipe(stripes=(1, 0)),
        lambda: Recipe("x", train=DataRecipe()),  # type: ignore[arg-type]
    ],
)
def test_recipes_built_in_python_meet_the_same_checks(build: Any) -> None:
    with pytest.raises(NestlingError):
        build()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["data.root=/nowhere"], "these data need no files"),
        (["data.name=cifar10", "data.size=64"], "it is for data.name=folder"),
        (["data.workers=9"], "it is for data.name=folder"),
        (["data.skip_unreadable=true"], "it is for data.name=folder"),
        (["data.name=own", "data.root=a:b", "data.augment=false"], "data of your own come as you hand them over"),
        (["data.name=own", "data.root=a:b", "data.cutmix=0.5"], "data of your own come as you hand them over"),
        (["network.way=keep"], "it is for a network of your own"),
        (["network.name=a:b", "network.stripes=1,1"], "comes as your function builds it"),
        (["network.name=a:b", "network.alone=2"], "comes as your function builds it"),
        (["strategy.damping=0.5"], "it is for strategy.name=damped, not osgd"),
        (["strategy.constant=3"], "it is for strategy.name=osgd-norm or normsgd, not osgd"),
        (["strategy.name=sgd", "strategy.order=3,2,1"], "not sgd"),
        (["strategy.name=sgd", "strategy.refresh=5"], "this strategy's weights do not follow from gradients"),
        (["train.schedule=cosine", "train.gamma=0.5"], "it is for train.schedule=step"),
        (["train.schedule=cosine", "train.milestones=1,2"], "it is for train.schedule=step"),
        (["train.teaches=last"], "there is no train.teacher"),
        (["train.distill_temperature=7"], "train.distill is 0"),
        (["train.loss=a:b", "train.smoothing=0.1"], "the loss is your own"),
    ],
)
def test_a_setting_that_would_change_nothing_is_refused(settings: list[str], why: str) -> None:
    key = settings[-1].partition("=")[0]
    with pytest.raises(NestlingError, match=f"{re.escape(key)} would have no effect: .*{re.escape(why)}"):
        refuse_idle(settings, [override(RECIPE, settings)])
    refuse_idle(settings[:-1], [override(RECIPE, settings[:-1])])
    usual = f"{key}={as_text(at(RECIPE, key))}"
    refuse_idle([usual], [RECIPE])


def test_a_setting_that_means_something_in_one_run_of_several_is_not_refused() -> None:
    runs = [override(RECIPE, [f"strategy.name={name}", "strategy.constant=2"]) for name in ("osgd", "normsgd")]
    refuse_idle(["strategy.constant=2"], runs)


def test_every_field_with_rules_is_one() -> None:
    named = {field for fields, _, _ in RULES for field in fields} | {f"strategy.{name}" for name in COMBINERS}
    assert named <= set(keys())


def test_numbers_that_float32_cannot_hold_are_refused() -> None:
    for setting in ("train.lr=1e300", "train.weight_decay=1e39", "strategy.importance=1e300,1,1"):
        with pytest.raises(NestlingError, match="at most 1e"):
            override(RECIPE, [setting])


def test_of_two_settings_of_one_key_the_later_counts() -> None:
    assert override(RECIPE, ["train.epochs=1", "train.epochs=2"]).train.epochs == 2


def test_recipes_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECIPE.train.epochs = 3  # type: ignore[misc]


@given(
    epochs=st.integers(0, 10**6),
    lr=st.floats(1e-9, 1e3),
    order=st.lists(st.integers(1, 9), unique=True),
    importance=st.lists(st.floats(0, 100)),
    augment=st.booleans(),
    root=st.text(st.characters(codec="utf-8", exclude_categories=["Z", "C"])),
)
def test_a_value_survives_its_text_and_json(
    epochs: int, lr: float, order: list[int], importance: list[float], augment: bool, root: str
) -> None:
    recipe = Recipe(
        "x",
        data=DataRecipe(augment=augment, root=root),
        strategy=StrategyRecipe(order=tuple(order), importance=tuple(importance)),
        train=TrainRecipe(epochs=epochs, lr=lr),
    )
    assert from_json(json.dumps(dataclasses.asdict(recipe))) == recipe
    texts = [f"{key}={as_text(at(recipe, key))}" for key in keys()]
    assert override(Recipe("y"), texts) == recipe


def as_text(value: Any) -> str:
    return ",".join(str(item) for item in value) if isinstance(value, tuple) else str(value)


def test_unknown_missing_and_wrong_json_fields_are_named() -> None:
    whole = dataclasses.asdict(RECIPE)
    more = {**whole, "train": {**whole["train"], "epoch": 3}}
    with pytest.raises(NestlingError, match=r"'train' has an unknown field 'epoch'; did you mean epochs"):
        from_dict(more)
    fewer = {**whole, "train": {k: v for k, v in whole["train"].items() if k != "lr"}}
    with pytest.raises(NestlingError, match=r"'train' lacks the field\(s\) lr"):
        from_dict(fewer)
    older = {**whole, "train": {k: v for k, v in whole["train"].items() if k != "decay_norms"}}
    assert from_dict(older) == RECIPE, "what a field did before there was one is its default"
    with pytest.raises(NestlingError, match="lacks the field"):
        from_json("{}")
    with pytest.raises(NestlingError, match="not JSON"):
        from_json("{")
    with pytest.raises(NestlingError, match="should be a JSON object"):
        from_dict({**whole, "train": [1]})
    with pytest.raises(NestlingError, match=r"train\.lr is 'x'"):
        from_dict({**whole, "train": {**whole["train"], "lr": "x"}})


def test_nearest_names_the_closest_first_and_lists_all_when_nothing_is_close() -> None:
    valid = ["osgd", "sgd", "greedy"]
    assert nearest("ogsd", valid).split(",")[0].split(" or ")[0] == "osgd"
    assert nearest("gree", valid) == "greedy"
    assert nearest("xxxx", valid) == "greedy, osgd or sgd"
    many = [f"name{i}" for i in range(20)]
    assert all(name in nearest("xxxx", many) for name in many) and len(nearest("name", many).split()) == 4
    assert nearest("x", []) == "(there are none)"
