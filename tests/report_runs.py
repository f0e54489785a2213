"""Real runs for the tests of reports: tiny networks trained for three epochs on some of the digits, then profiled."""

from dataclasses import replace
from pathlib import Path

from nestling.recipes.recipe import DataRecipe, NetworkRecipe, Recipe, TrainRecipe, override
from nestling.studies.profile import profile
from nestling.train import train

NAME = "width-digits"


def recipe(network: str, strategy: str, seed: int = 0, alone: int = 0) -> Recipe:
    made = Recipe(
        name=f"{network}-{strategy}",
        data=DataRecipe(limit=600),
        network=NetworkRecipe(network, alone=alone, blocks=(1, 1)),
        train=TrainRecipe(epochs=3, batch=20, lr=0.1, schedule="cosine", seed=seed, device="cpu", diagnostics=True),
    )
    return override(made, [f"strategy.name={strategy}"])


def make_runs(folder: Path) -> Path:
    """A width nest by osgd (two seeds) and sgd, its independent nets (the smallest twice), and the even-width baseline."""
    made = {
        "osgd-0": recipe(NAME, "osgd"),
        "osgd-1": recipe(NAME, "osgd", seed=1),
        "even": recipe("even-digits", "osgd"),
    }
    made["sgd-0"] = replace(recipe(NAME, "sgd"), train=replace(recipe(NAME, "sgd").train, diagnostics=False))
    made |= {f"alone-{stage}-0": recipe(NAME, "sgd", 0, alone=stage) for stage in (1, 2, 3)}
    made["alone-1-1"] = recipe(NAME, "sgd", 1, alone=1)  # a seed without the other sizes: of no use to an oracle
    for name, each in made.items():
        train(each, str(folder / name), command=f"nestling train {each.name}", quiet=True)
        profile(str(folder / name), device="cpu", engine="eager", repeats=20)
    return folder
