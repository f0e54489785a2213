"""An answer: the class, how sure, which stage said so, when, and whether anything better can still come.

Stage 0 is the class prior, for when not even the first stage was done. `refine` goes on where this answer stopped.
Knows nothing of how answers are made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False, repr=False)
class Answer:
    """The best answer there was when it was handed over."""

    label: int  # the most probable class
    name: str  # and what it is called
    stage: int  # the stage that answered; 0 = the class prior
    size: str  # that stage's size, such as "w2"; "" for the prior
    elapsed: float  # seconds from the call until now
    final: bool  # nothing better will come: the last stage answered, or one that was sure enough
    _probabilities: Callable[[], Floats]
    _refine: Callable[[float | None], "Answer"]

    def __repr__(self) -> str:
        return (
            f"Answer(label={self.label}, name={self.name!r}, confidence={self.confidence:.3f}, stage={self.stage}, "
            f"size={self.size!r}, elapsed={self.elapsed:.6f}, final={self.final})"
        )

    @cached_property
    def probabilities(self) -> Floats:
        """Of every class, (classes,). Worked out when they are wanted: between the deadline's timer and handing over an
        answer every microsecond counts, and on a processor that just woke up a softmax takes dozens."""
        return self._probabilities()

    @property
    def confidence(self) -> float:
        return float(self.probabilities[self.label])

    def refine(self, deadline: float | None = None) -> "Answer":
        """Go on for `deadline` more seconds (None: to the last stage) from the work already done. Never worse than this."""
        return self if self.final else self._refine(deadline)


def softmax(logits: Floats) -> Floats:
    """Along the last axis; written out, because numpy has none."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: Floats = shifted / shifted.sum(axis=-1, keepdims=True)
    return result
