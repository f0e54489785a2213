"""The paper's runs on CIFAR-10: 200 epochs, batch 128, lr 0.1 x0.2 at 60/120/160, weight decay 5e-4.

In: nothing. Out: complete recipes with OSGD; `--set strategy.name=sgd` gives the other columns of the paper's tables,
`--set network.alone=2` the independent net of stage 2's size. Expected numbers are the paper's, as error in % per stage.
"""

from dataclasses import replace

from nestling.recipes.recipe import DataRecipe, NetworkRecipe, Recipe, StrategyRecipe, TrainRecipe


def width() -> Recipe:
    """Table 1, width-nested ResNet-42. Paper, OSGD: 12.3 / 8.9 / 7.3. `nestling train cifar10-width`"""
    return Recipe(
        name="cifar10-width",
        data=DataRecipe(name="cifar10"),
        network=NetworkRecipe(name="width-resnet42"),
        strategy=StrategyRecipe(name="osgd"),
        train=TrainRecipe(precision="bfloat16", evaluate_every=10, checkpoint_every=10),
    )


def _other(name: str, network: str) -> Recipe:
    return replace(width(), name=f"cifar10-{name}", network=NetworkRecipe(name=network))


def even() -> Recipe:
    """Table 2, even-width ResNet-42. Paper, OSGD: 13.9 / 10.7 / 8.3 / 8.3. `nestling train cifar10-even`"""
    return _other("even", "even-resnet42")


def depth() -> Recipe:
    """Table 1, depth-nested Sparse ResNet-98. Paper, OSGD: 10.0 / 8.4 / 7.4 / 6.6. `nestling train cifar10-depth`"""
    return _other("depth", "depth-sparse98")


def alternate() -> Recipe:
    """Table 1, width and depth in turn. Paper, OSGD: 28.3 / 14.8 / 13.4 / 8.6 / 6.8. `nestling train cifar10-alternate`"""
    return _other("alternate", "alternate-sparse98")


def together() -> Recipe:
    """Table 1, width and depth at once. Paper, OSGD: 26.2 / 13.1 / 6.8. `nestling train cifar10-together`"""
    return _other("together", "together-sparse98")


def msdnet() -> Recipe:
    """MSDNet with seven exits, by its authors' recipe: 300 epochs, batch 64, the sum of the losses, lr 0.1 x0.1 at 150/225, no
    Nesterov momentum (but bf16). Not the paper's: to stand beside its nests. `nestling train cifar10-msdnet`"""
    train = replace(
        width().train, epochs=300, batch=64, weight_decay=1e-4, milestones=(150, 225), gamma=0.1, nesterov=False
    )
    return replace(_other("msdnet", "msdnet"), strategy=StrategyRecipe(name="sgd-sum"), train=train)


def cascade() -> Recipe:
    """Table 2, the cascade (EANN). Paper, OSGD: 11.6 / 10.9 / 8.0 / 6.4. `nestling train cifar10-cascade`"""
    return _other("cascade", "cascade-sparse98")
