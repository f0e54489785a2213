"""Losses to one gradient row per task, and rows to `.grad`.

`backward` is the whole of it for most users; `Accumulator` adds rows over micro-batches and combines once.
"""

from nestling.gradients.accumulate import Accumulator
from nestling.gradients.call import backward
from nestling.gradients.contract import Blocks, Combiner, TaskRows
from nestling.gradients.owners import SCOPES, Layout, Piece
from nestling.gradients.rows import Rows
from nestling.gradients.walks import owners_from, owners_of

__all__ = [
    "SCOPES",
    "Accumulator",
    "Blocks",
    "Combiner",
    "Layout",
    "Piece",
    "Rows",
    "TaskRows",
    "backward",
    "owners_from",
    "owners_of",
]
