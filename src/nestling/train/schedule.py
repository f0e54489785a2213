"""The learning rate of every step. In: the training part of a recipe. Out: floats. Pure; knows no optimizer."""

import math

from nestling.recipes.recipe import TrainRecipe


def learning_rate(train: TrainRecipe, step: int, steps_per_epoch: int) -> float:
    """The rate at one step (from 0): warm-up if any, then steps at milestones or a cosine down to zero."""
    warm = train.warmup * steps_per_epoch
    if step < warm:
        return train.lr * (step + 1) / warm
    if train.schedule == "cosine":
        total = max(1, train.epochs * steps_per_epoch - warm)
        return train.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / total)))
    passed = sum(step >= milestone * steps_per_epoch for milestone in train.milestones)
    return train.lr * train.gamma**passed


def epoch_rates(train: TrainRecipe, epoch: int, steps_per_epoch: int) -> list[float]:
    """The rates of one epoch (from 0), step by step."""
    first = epoch * steps_per_epoch
    return [learning_rate(train, first + i, steps_per_epoch) for i in range(steps_per_epoch)]
