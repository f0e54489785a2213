"""Training: a recipe becomes a run folder.

run.py and beside.py take one run, or many, from beginning to end, begin.py begins one, loop.py is the loop, step.py what
happens to one batch, stepping.py how batches are driven, schedule.py the learning rate, capabilities.py what the device can
do, progress.py what a person sees, stop.py how to stop it.
"""

from nestling.train.beside import Outcome, side_by_side
from nestling.train.loop import Training
from nestling.train.run import train, train_side_by_side

__all__ = ["Outcome", "Training", "side_by_side", "train", "train_side_by_side"]
