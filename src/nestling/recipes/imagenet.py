"""The paper's runs on ImageNet folders: 90 epochs, batch 256, lr 0.1 x0.1 at 30/60/80, weight decay 1e-4.

In: nothing. Out: complete recipes; `--set data.root=FOLDER` says where the images are. Expected: the paper's top-1 errors.
"""

from nestling.recipes.recipe import DataRecipe, NetworkRecipe, Recipe, StrategyRecipe, TrainRecipe


def _imagenet(name: str, network: str) -> Recipe:
    return Recipe(
        name=name,
        data=DataRecipe(name="folder", size=224, workers=8),
        network=NetworkRecipe(name=network),
        strategy=StrategyRecipe(name="osgd"),
        train=TrainRecipe(
            epochs=90, batch=256, weight_decay=1e-4, milestones=(30, 60, 80), gamma=0.1, precision="bfloat16"
        ),
    )


def width() -> Recipe:
    """Table 3, width-nested ResNet-50. Paper, OSGD: 36.7 / 31.7 / 28.3. `nestling train imagenet-width --set data.root=DIR`"""
    return _imagenet("imagenet-width", "width-resnet50")


def depth() -> Recipe:
    """Table 3, depth-nested Sparse ResNet-66. Paper, OSGD: 32.9 / 29.2 / 27.1. `nestling train imagenet-depth --set ...`"""
    return _imagenet("imagenet-depth", "depth-sparse66")
