"""The paper's ImageNet networks at a size that minutes of a GPU hold: Tiny ImageNet, 200 classes, pictures of 64x64.

In: nothing. Out: complete recipes, the paper's ImageNet schedule at a third of its length (30 epochs, lr 0.1 x0.1 at 10/20/27,
weight decay 1e-4), and a smaller network by our best recipe. `nestling data tiny-imagenet --root FOLDER` prepares the pictures;
`--set data.root=FOLDER` says where they are, if not in the usual place.
"""

from dataclasses import replace

from nestling.recipes import imagenet
from nestling.recipes.recipe import DataRecipe, NetworkRecipe, Recipe, StrategyRecipe, TrainRecipe

DATA = DataRecipe(name="tiny-imagenet")


def _tiny(recipe: Recipe, name: str) -> Recipe:
    train = replace(recipe.train, epochs=30, milestones=(10, 20, 27), evaluate_every=5, checkpoint_every=5)
    return replace(recipe, name=name, data=DATA, train=train)


def width() -> Recipe:
    """Width-nested ResNet-50. `nestling train tiny-width --set data.root=FOLDER`"""
    return _tiny(imagenet.width(), "tiny-width")


def depth() -> Recipe:
    """Depth-nested Sparse ResNet-66. `nestling train tiny-depth --set data.root=FOLDER`"""
    return _tiny(imagenet.depth(), "tiny-depth")


def small() -> Recipe:
    """Width-nested ResNet-18 with a narrower end, 16 MB in half precision, by our best recipe: the last stage teaches the
    others. `nestling train tiny-small --set data.root=FOLDER`"""
    return Recipe(
        name="tiny-small",
        data=DATA,
        network=NetworkRecipe(name="width-resnet18"),
        strategy=StrategyRecipe(name="sgd", importance=(1.0, 1.0, 2.0)),
        train=TrainRecipe(
            epochs=40, batch=256, lr=0.2, warmup=2, schedule="cosine", distill=0.5, average=0.999, precision="bfloat16",
            evaluate_every=5, checkpoint_every=5,
        ),
    )  # fmt: skip
