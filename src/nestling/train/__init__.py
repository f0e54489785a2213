"""Training: a recipe becomes a run folder.

loop.py is the loop, step.py what happens to one batch, engine.py how batches are driven, schedule.py the learning rate,
progress.py what a person sees.
"""

from nestling.train.loop import Training, command, show, train, train_side_by_side

__all__ = ["Training", "command", "show", "train", "train_side_by_side"]
