"""The parameters that need a gradient at the same time, and what was planned and found for them.

In come parameters with names, and the net they are of; out come their shapes in memory and, where the net knows its
owners, their Layout. Planned on the host once; parameters may be frozen, unfrozen and replaced between steps.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from nestling.errors import NestlingError
from nestling.gradients.checks import Named, refuse_hooks, trainable
from nestling.gradients.owners import Box, Layout, MemoryShape, from_masks, from_owners, share_of
from nestling.gradients.reduce import agree
from nestling.gradients.sharded import Sharded
from nestling.gradients.wrapped import route_of


class Trained:
    """A set of parameters that need a gradient at the same time."""

    def __init__(self, given: Named, net: nn.Module | None, asked: bool = True) -> None:
        """`asked`: whether the net is asked for its owners."""
        self.named = trainable(given)
        self.route = route_of(self.named, net)
        self.sharded = self.route if isinstance(self.route, Sharded) else None
        self.params = [p for _, p in self.named] if self.sharded is None else self.sharded.shares
        refuse_hooks(self.named)
        self.device = self.params[0].device
        self.specs = tuple(MemoryShape.of(p) for p in self.params)
        self.whole_specs = tuple(MemoryShape.of(p) for _, p in self.named) if self.sharded is not None else self.specs
        self.wholes: list[Box] = [tuple((0, size) for size in spec.stored) for spec in self.specs]
        # Known from the start with owners, and after the first step between ranks; else found anew each step.
        self.cuts: dict[Layout, Layout] = {}
        whole = _remembered(net, self.named) if net is not None and asked else None
        self.layout = None if whole is None else self.share_of(whole)
        self.used: Layout | None = None
        self.found = False  # whether the layout is what ranks agreed on rather than given
        self.agreed: dict[int, list[int]] = {}  # per number of rows, the owner masks all ranks agreed on
        self.missed = set(range(len(self.params)))  # parameters no task has reached yet
        self.met = False  # whether a loss reached a parameter on any rank
        self.known: dict[tuple[int, ...], bool] = {}  # owner masks read off a graph: whether it could tell them
        self.unused: set[tuple[int, int]] = set()  # (task, parameter) that a graph joins by zeros alone
        self.clear = True  # whether rows that were looked at left nothing open
        self.told: dict[int, tuple[int, ...]] = {}  # per number of tasks, the last owner masks of a graph that could

    def places(self, leaves: set[int]) -> set[int]:
        """The parameters among a graph's leaves, which are given by id."""
        ids = [id(p) for _, p in self.named] if self.sharded is None else self.sharded.leaves()
        return {i for i, leaf in enumerate(ids) if leaf in leaves}

    def share_of(self, whole: Layout) -> Layout:
        """What this rank holds of a layout of whole parameters: all of it, unless they are sharded."""
        if self.sharded is None:
            return whole
        if whole not in self.cuts:
            self.cuts[whole] = share_of(whole, self.sharded.windows)
        return self.cuts[whole]

    def reached_by(self, masks: Sequence[int], tasks: int) -> Layout:
        """The layout that the graph tells: per parameter the tasks that reach it, as bits."""
        return self.share_of(from_masks(self.whole_specs, tuple(masks), tasks))

    def zeros(self, index: int, box: Box) -> Tensor:
        return self.params[index].new_zeros([stop - start for start, stop in box])

    def fill_up(self, task: int, row: list[Tensor | None]) -> None:
        """Zeros for a task that is absent, where it is known what it owns."""
        if self.layout is not None:
            for i, box in enumerate(self.layout.boxes[task]):
                if box is not None and row[i] is None:
                    row[i] = self.zeros(i, box)

    def agree(
        self, masks: list[int], stored: list[list[Tensor | None]], lone: bool, group: dist.ProcessGroup
    ) -> list[int]:
        """Owner masks joined over the ranks, once; what only other ranks reached is a zero here."""
        count = len(stored)
        if count not in self.agreed:
            self.agreed[count] = agree(masks, count, self.device, group)
        for i, (mine, joined) in enumerate(zip(masks, self.agreed[count], strict=True)):
            if mine & ~joined:
                raise self.disagreement(i)
            for task, row in enumerate(stored):
                if row[i] is None and joined >> task & 1:
                    row[i] = torch.zeros_like(self.params[i]) if lone else self.zeros(i, self.wholes[i])
        return self.agreed[count]

    def disagreement(self, index: int) -> NestlingError:
        return NestlingError(
            f"{self.named[index][0]} got a gradient from a task that did not reach it on any rank at the first "
            f"step, when the ranks agreed on what to send each other: pass owners=, or use every parameter in the first step"
        )


class Statistics:
    """Running statistics that a checkpoint's recomputation moves, once per backward pass; kept at the first move.

    Plain backward recomputes a checkpoint once, and so its batch norms count a batch twice; a pass per task would
    count it once more for each. Where parameters alone were given, modules that run inside `watched` are found as they do.
    """

    def __init__(self, net: nn.Module | None) -> None:
        self.buffers: list[list[Tensor]] = []  # per module: torch counts only some changes
        self.versions: list[int] = []
        self.moved: dict[int, list[Tensor]] = {}
        self.seen: set[int] = set()
        self.known = net is not None
        for module in [] if net is None else net.modules():
            self._meet(module)

    def _meet(self, module: nn.Module, given: object = None) -> None:
        """Keep in mind what a module holds, before it runs."""
        held = [b for b in module._buffers.values() if b is not None]
        if held and id(module) not in self.seen:
            self.seen.add(id(module))
            self.buffers.append(held)
            self.versions.append(self._version(held))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """For the backward passes."""
        if self.known:
            yield
            return
        hook = register_module_forward_pre_hook(self._meet)
        try:
            yield
        finally:
            hook.remove()

    @torch.no_grad()
    def settle(self) -> None:
        """Call after each backward pass."""
        for i, (buffers, version) in enumerate(zip(self.buffers, self.versions, strict=True)):
            if self._version(buffers) == version:
                continue
            if i in self.moved:
                for buffer, kept in zip(buffers, self.moved[i], strict=True):
                    buffer.copy_(kept)
            else:
                self.moved[i] = [buffer.clone() for buffer in buffers]
            self.versions[i] = self._version(buffers)

    @staticmethod
    def _version(buffers: list[Tensor]) -> int:
        return sum(buffer._version for buffer in buffers)


_layouts: "weakref.WeakKeyDictionary[nn.Module, tuple[tuple[object, ...], Layout]]" = weakref.WeakKeyDictionary()


def _remembered(net: nn.Module, parameters: Named) -> Layout | None:
    """The layout of a net that knows its owners; costly to plan, so kept as long as the net lives."""
    if not callable(getattr(net, "owners", None)):
        return None
    names = tuple((name, MemoryShape.of(p)) for name, p in parameters)
    kept = _layouts.get(net)
    if kept is not None and kept[0] == names:
        return kept[1]
    given = _asked(net)
    tasks = max((int(mask.max()).bit_length() for mask in given.values() if mask.numel()), default=1)
    layout = from_owners(parameters, given, tasks)
    _layouts[net] = (names, layout)
    return layout


def _asked(net: nn.Module) -> Mapping[str, Tensor]:
    """What the net's owners() says, if it speaks of parameters."""
    try:
        given = net.owners()  # type: ignore[operator]
    except Exception as error:
        raise _unrelated(net, f"raised {error!r}") from error
    if not isinstance(given, Mapping):
        raise _unrelated(net, f"gave a {type(given).__name__}")
    for name, mask in given.items():
        if not isinstance(mask, Tensor):
            raise _unrelated(net, f"gave a {type(mask).__name__} for {name!r}")
    return given


def _unrelated(net: nn.Module, found: str) -> NestlingError:
    return NestlingError(
        f"{type(net).__name__}.owners() {found}: expected a mapping from parameter names to int64 bit masks, one bit per "
        f"task. If that method is about something else, pass model.named_parameters() instead of the model"
    )
