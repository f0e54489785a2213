"""The paper's ImageNet networks at a size that an afternoon holds: Tiny ImageNet, 200 classes, pictures of 64x64.

In: nothing. Out: complete recipes with the paper's ImageNet schedule (90 epochs, lr 0.1 x0.1 at 30/60/80, weight decay 1e-4);
`--set data.root=FOLDER` says where `nestling data tiny-imagenet --root FOLDER` has prepared the pictures.
"""

from dataclasses import replace

from nestling.recipes import imagenet
from nestling.recipes.recipe import DataRecipe, Recipe


def _tiny(recipe: Recipe, name: str) -> Recipe:
    train = replace(recipe.train, evaluate_every=5, checkpoint_every=5)
    return replace(recipe, name=name, data=DataRecipe(name="tiny-imagenet"), train=train)


def width() -> Recipe:
    """Width-nested ResNet-50. `nestling train tiny-width --set data.root=FOLDER`"""
    return _tiny(imagenet.width(), "tiny-width")


def depth() -> Recipe:
    """Depth-nested Sparse ResNet-66. `nestling train tiny-depth --set data.root=FOLDER`"""
    return _tiny(imagenet.depth(), "tiny-depth")
