"""Weight gradients beside the backward pass: no kernel of it waits for them, so they fill what it leaves of the chip.

In: work and what it reads. Out: its result, good on the pass's own stream from `Joined` on. Bits do not depend on it. Results lie
in the side stream's memory; they may be freed at any time, since whatever runs there next waits for those who used them.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PREFERRED = -1  # priority of the streams that a step waits for: what runs aside takes only what they leave
TOGETHER = 8  # sums of one kind that are made by one launch
AHEAD = 4  # layers by which the pass may be ahead: what their gradients read cannot be freed before


class Aside:
    """A stream beside the one a backward pass runs on; on a CPU everything is done in its turn."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.held: deque[tuple[torch.cuda.Event, tuple[Any, ...]]] = deque()
        self.waiting: list[Any] = []
        self.kind: tuple[Any, ...] = ()

    def run(self, work: Callable[..., Any], *reads: Any) -> Any:
        if self.stream is None:
            return work(*reads)
        main = torch.cuda.current_stream()
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            found = work(*reads)
        self.held.append((self.stream.record_event(), reads))
        if len(self.held) > AHEAD:
            main.wait_event(self.held[0][0])
            self.held.popleft()
        return found

    def together(self, work: Callable[[list[Any]], None], item: Any, *kind: Any) -> None:
        """Work on results of `run` that may wait until there are more of its kind, or for `join`: one launch for many."""
        if self.waiting and (len(self.waiting) == TOGETHER or self.kind != (work, *kind)):
            self.flush()
        self.waiting.append(item)
        self.kind = (work, *kind)
        if torch.is_anomaly_enabled():  # then autograd looks at every result at once
            self.join()

    def flush(self) -> None:
        if self.waiting:
            with torch.cuda.stream(self.stream):  # none: nothing changes
                self.kind[0](self.waiting)
            self.waiting = []

    def join(self) -> None:
        """From here on the current stream may use everything, and what was read may go."""
        self.flush()
        if self.held and self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            self.held.clear()

    def forget(self) -> None:
        """What a pass left that did not come to its end must not be done by the next, which may be captured."""
        if self.held and self.stream is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(self.stream)
        self.waiting = []
        self.held.clear()


class Joined(torch.autograd.Function):
    """(weights) -> the same. Their gradients pass here on their way out, after those who ran aside are waited for.

    Called before all else in a forward pass, it is the last that autograd comes to on the way back; a pass that ran anything
    aside must ask for the gradient of at least one weight, or it does not come here."""

    @staticmethod
    def forward(ctx: Any, aside: Aside, *weights: Tensor) -> tuple[Tensor, ...]:
        aside.forget()
        ctx.aside = aside
        ctx.set_materialize_grads(False)
        found = tuple(weight.view_as(weight) for weight in weights)
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(each for each, wanted in zip(found, needed, strict=True) if not wanted))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.aside.join()
        return None, *grads
