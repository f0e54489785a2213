"""Weight gradients on a stream beside the backward pass: no kernel of it waits for them, so they fill what it leaves of the chip.

In: work, and items for it. Several items of one kind are done at once: one layer would not fill the chip, or would have to be
split into so many parts that adding them up costs as much as making them. Results may be used on the pass's own stream after
`JoinSideStream`. They are bit for bit what they would be on that stream.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nestling.kernels.nvrtc import MAX_LAYERS

HIGH_PRIORITY = -1  # of the streams that a step waits for: the side stream takes only what they leave
MAX_GROUPS = 2  # of items by which the side stream may be behind: what they read cannot be freed before


class SideStream:
    """A stream beside the one a backward pass runs on; on a CPU everything is done there, but at the same times."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.running: deque[tuple[torch.cuda.Event, list[Any]]] = deque()
        self.waiting: list[Any] = []
        self.work: Callable[[list[Any]], None] | None = None
        self.kind: tuple[Any, ...] = ()

    def submit(self, work: Callable[[list[Any]], None], item: Any, *kind: Any) -> None:
        """Work on what there is now; it may wait until there are more items of its kind, or for `join`."""
        if self.kind != kind:
            self.flush()
        self.work, self.kind = work, kind
        self.waiting.append(item)
        if len(self.waiting) == MAX_LAYERS:
            self.flush()
        if torch.is_anomaly_enabled():  # then autograd looks at every result at once
            self.join()

    def flush(self) -> None:
        items, self.waiting = self.waiting, []
        if not items or self.work is None:
            return
        if self.stream is None:
            self.work(items)
            return
        main = torch.cuda.current_stream()
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            self.work(items)
        self.running.append((self.stream.record_event(), items))
        if len(self.running) > MAX_GROUPS:
            main.wait_event(self.running[0][0])
            self.running.popleft()

    def join(self) -> None:
        """From here on the current stream may use everything, and what was read may go."""
        self.flush()
        if self.running and self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            self.running.clear()

    def discard(self) -> None:
        """What a pass left that did not come to its end must not be done by the next, which may be captured."""
        if self.running and self.stream is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(self.stream)
        self.waiting = []
        self.running.clear()


class JoinSideStream(torch.autograd.Function):
    """(weights) -> the same. Their gradients pass here on their way out, after the side stream is waited for.

    Called before all else in a forward pass, it is the last that autograd comes to on the way back; a pass that used the side
    stream must ask for the gradient of at least one weight, or it does not come here."""

    @staticmethod
    def forward(ctx: Any, side: SideStream, *weights: Tensor) -> tuple[Tensor, ...]:
        side.discard()
        ctx.side = side
        ctx.set_materialize_grads(False)
        found = tuple(weight.view_as(weight) for weight in weights)
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(each for each, wanted in zip(found, needed, strict=True) if not wanted))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.side.join()
        return None, *grads
