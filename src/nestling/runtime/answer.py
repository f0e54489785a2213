"""An answer: the output, its class and how sure, which stage said so, when, and whether anything better can still come.

Where not even the first stage was done there is no answer: stage 0, no name, false as a condition, and only the
probabilities that the classes have before looking. `refine` goes on where this answer stopped. Answers may be copied, and
pickled for another process, where they cannot be refined. Knows nothing of how answers are made.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from nestling.errors import NestlingError
from nestling.export.spec import Spec
from nestling.runtime.engine import Floats


@dataclass(frozen=True, eq=False, repr=False)
class Answer:
    """The best answer there was when it was handed over."""

    label: int  # the most probable class; -1 where answers are no classes
    name: str  # and what it is called; "" if no stage has answered, or there are no classes
    stage: int  # the stage that answered; 0 = none
    size: str  # that stage's size, such as "w2"; "" if none
    elapsed: float  # seconds from the call until now
    final: bool  # nothing better will come: the last stage answered, or one that was sure enough
    _probabilities: Callable[[], Floats]
    _refine: Callable[[float | None], "Answer"]
    output: Floats | None = (
        None  # what the stage gave: a score for each class, a mask, numbers; None if no stage has answered
    )

    def __repr__(self) -> str:
        shape = None if self.output is None else self.output.shape
        said = (
            f"label={self.label}, name={self.name!r}, confidence={self.confidence:.3f}"
            if self.scored
            else f"output={shape}"
        )
        return f"Answer({said}, stage={self.stage}, size={self.size!r}, elapsed={self.elapsed:.6f}, final={self.final})"

    @property
    def scored(self) -> bool:
        """Whether the answer is one of several classes; else only its output says something."""
        return self.label >= 0

    @cached_property
    def probabilities(self) -> Floats:
        """Of every class, (classes,). Worked out when they are wanted: between the deadline's timer and handing over an
        answer every microsecond counts, and on a processor that just woke up a softmax takes dozens."""
        return self._probabilities()

    @property
    def confidence(self) -> float:
        return float(self.probabilities[self.label])

    def __bool__(self) -> bool:
        """Whether any stage has answered."""
        return self.stage > 0

    def __copy__(self) -> "Answer":
        return replace(self)

    def __deepcopy__(self, memory: object) -> "Answer":
        return replace(self)  # nothing in it can change but the probabilities, which each works out for itself

    def __reduce__(self) -> tuple[Callable[..., "Answer"], tuple[object, ...]]:
        """For pickling: everything but the way back to the runtime."""
        told = (self.label, self.name, self.stage, self.size, self.elapsed, self.final)
        return elsewhere, (*told, self.probabilities if self.scored else None, self.output)

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold of it."""
        if not self.scored:
            found = [] if self.output is None else self.output.tolist()
            timed = {"ms": self.elapsed * 1e3, "final": self.final}
            return {"stage": self.stage, "size": self.size, "output": found, **timed}
        return {
            "stage": self.stage,
            "size": self.size,
            "class": self.name,
            "label": self.label,
            "probability": self.confidence,
            "probabilities": [float(value) for value in self.probabilities],
            "ms": self.elapsed * 1e3,
            "final": self.final,
        }

    def refine(self, *, deadline: float | None = None) -> "Answer":
        """Go on for `deadline` more seconds (None: to the last stage) from the work already done. Never worse than this."""
        return self if self.final else self._refine(deadline)


def made(*told: Any) -> Answer:
    """`Answer(*told)`, in a third of the time: a frozen class sets its fields one by one."""
    answer = object.__new__(Answer)
    answer.__dict__.update(zip(FIELDS, told, strict=True))
    return answer


def elsewhere(
    label: int,
    name: str,
    stage: int,
    size: str,
    elapsed: float,
    final: bool,
    probabilities: Floats | None,
    output: Floats | None,
) -> Answer:
    """An answer that came from another process."""
    found = no_classes if probabilities is None else partial(np.copy, probabilities)
    return Answer(label, name, stage, size, elapsed, final, found, refuse, output)


FIELDS = tuple(field.name for field in fields(Answer))


def refuse(deadline: float | None) -> Answer:
    raise NestlingError("this answer came from another process, so its work is not here; ask the runtime again")


def no_classes() -> Floats:
    raise NestlingError("this network answers with no classes, so there is no probability; its answer is answer.output")


def told(spec: Spec, prior: Floats, stage: int, output: Floats | None) -> tuple[int, str, str, Callable[[], Floats]]:
    """What a stage's output says: the most probable class, its name, the stage's size, and how probabilities are found."""
    size = spec.sizes[stage - 1] if stage else ""
    if spec.output:
        return -1, "", size, no_classes
    label = int((prior if output is None else output).argmax())
    probabilities = partial(np.copy, prior) if output is None else partial(softmax, output)
    return label, spec.classes[label] if stage else "", size, probabilities


def softmax(logits: Floats) -> Floats:
    """Along the last axis; written out, because numpy has none."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: Floats = shifted / shifted.sum(axis=-1, keepdims=True)
    return result
