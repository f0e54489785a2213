"""The nested network: one set of parameters, two ways to run it.

In: a plan. `net(x)` gives all stages' logits at once, one masked dense operation per layer (training). `net.stages` runs
stage by stage, each computing only what is new: `logits, state = stage(state)`, beginning with state = (x,). State is
passed, never kept. `net.subnet(s)` is D_s by itself. How layers are wired is the plan's business, not this room's.
"""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from nestling.errors import NestlingError
from nestling.nets.layers import Cut, MaskAll
from nestling.nets.modes import unhooked
from nestling.nets.plan import ChannelRun, Node, NodeWork, Plan

State = tuple[Tensor, ...]


def attach(root: nn.Module, path: str, layer: nn.Module | None) -> None:
    """Hang a layer into the module tree under a dotted name, so that state-dict keys read like the plan."""
    *parents, last = path.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, nn.Module())
        root = getattr(root, parent)
    before = getattr(root, last, None)
    root.add_module(last, layer)
    if layer is not None and isinstance(before, nn.Module):  # a module that has layers below it and is one itself
        for name, child in before.named_children():
            layer.add_module(name, child)


class NestedNet(nn.Module):
    """A network of nested subnetworks D_1 ⊂ ... ⊂ D_n, made from a plan."""

    if TYPE_CHECKING:  # torch declares that to call a module gives Any

        def __call__(self, x: Tensor) -> tuple[Tensor, ...]: ...

    def __init__(self, plan: Plan, modules: Mapping[str, nn.Module] | None = None) -> None:
        """`modules` holds the modules of `Module` operations (activations, dropout, ...) by node name."""
        super().__init__()
        self.plan = plan
        given = modules or {}
        for node in plan.nodes:
            if node.op.layered and not node.shares:
                layer = given[node.name] if node.op.given else node.op.layer(node, plan.reads_of(node))
                attach(self, node.name, layer)
        self._last_use = last_uses(((node.name, node.reads) for node in plan.nodes), plan.heads)
        self._stages: tuple[Stage, ...] | None = None
        self._staged: list[nn.Module] = []  # the modules that the stages were made of

    def layer(self, name: str) -> Any:
        """The module of a node. Looked up, never cached: deepcopy and module replacement then just work."""
        return self.get_submodule(self.plan.by_name[name].shares or name)

    @property
    def sizes(self) -> tuple[str, ...]:
        return self.plan.sizes

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        check_input(self.plan, x)
        values: dict[str, Tensor] = {self.plan.input.name: x}
        live = (
            {} if isinstance(x, fx.Proxy) else self.live_weights()
        )  # who records layers wants each with its own weight
        for node in self.plan.nodes[1:]:
            reads = [values[read] for read in node.reads]
            if (node.shares or node.name) in live:
                reads.append(live[node.shares or node.name])
            values[node.name] = self.compute(node, reads)
            for done in self._last_use.get(node.name, ()):
                del values[done]
        return tuple(values[head] for head in self.plan.heads)

    def live_weights(self) -> dict[str, Tensor]:
        """The masked weights of all layers that have a mask, made in one go: one call instead of one per layer.

        Not under torch.compile, which fuses masks by itself, nor under torch.func, which has no rule for such calls."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return {}
        layers = {n.name: self.layer(n.name) for n in self.plan.nodes if n.op.weighted and not n.shares}
        masked = {name: layer for name, layer in layers.items() if masked_layer(name, layer).mask is not None}
        if not masked:
            return {}
        weights = MaskAll.apply(
            *(layer.weight for layer in masked.values()), *(layer.mask for layer in masked.values())
        )
        return dict(zip(masked, weights, strict=True))

    def compute(self, node: Node, reads: list[Tensor]) -> Tensor:
        """One node over all its channels; a masked weight may follow what it reads."""
        return node.op.whole(self.layer(node.name) if node.op.layered else None, reads)

    @property
    def stages(self) -> "tuple[Stage, ...]":
        """The network stage by stage. Stages share this network's layers; they are made anew when one was replaced."""
        made, layers = self._stages, list(self.modules())
        if made is None or layers != self._staged:
            made = tuple(Stage(self, index).train(self.training) for index in range(len(self.plan.heads)))
            self._stages, self._staged = made, layers
        unhooked(self, self.plan.name)
        return made

    def train(self, mode: bool = True) -> "NestedNet":
        super().train(mode)
        for stage in self._stages or ():
            stage.training = mode
        return self

    def answers(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the logits of one stage after another; stop whenever you like."""
        check_input(self.plan, x)
        state: State = (x,)
        for stage in self.stages:
            logits, state = stage(state)
            yield logits

    def owners(self) -> dict[str, Tensor]:
        """For every parameter, per entry, the tasks whose loss depends on it: bit t is stage t+1, 0 is a masked entry."""
        found: dict[str, Tensor] = {}
        for node in self.plan.nodes:
            if not node.op.layered or node.shares:
                continue
            bits = torch.tensor(self.plan.owners[node.name])
            for name, parameter in self.layer(node.name).named_parameters(recurse=node.op.given):
                apart = parameter.numel() > 1 and not node.op.given
                owned = bits.view(-1, *[1] * (parameter.dim() - 1)) if apart else bits[:1]
                if node.op.given:  # somebody else's module is owned as one, by whoever needs any of its channels
                    owned = torch.tensor([reduce(or_, self.plan.owners[node.name])])
                mask = getattr(self.layer(node.name), "mask", None)
                if name == "weight" and mask is not None:
                    mask = mask[(..., *[slice(1)] * (mask.dim() - 2))]  # all pixels of a kernel are alike
                    owned = owned.to(mask.device) * mask.to(torch.int64)
                found[f"{node.name}.{name}"] = owned
        return found

    def subnet(self, stage: int) -> "Alone":
        """D_stage as a stand-alone module: its own copy of its weights, nothing of later stages, one answer."""
        plan = self.plan.restrict(stage)
        kept = self.plan.kept(stage)
        memo: dict[int, Any] = {}  # one for all: what lends a parameter to another still does
        given = {n.name: copy.deepcopy(self.layer(n.name), memo) for n in plan.nodes if n.op.given}
        small = NestedNet(plan, given).train(self.training)
        for node in plan.nodes:
            if node.op.given:
                for mine, theirs in zip(small.layer(node.name).modules(), self.layer(node.name).modules(), strict=True):
                    mine.training = theirs.training
            elif node.op.layered and not node.shares:
                follow(small.layer(node.name), has_its_weight(node.name, self.layer(node.name)))
        unhooked(self, self.plan.name)
        small.load_state_dict(cut_state(self.plan, small, kept, self.state_dict()))
        return Alone(small)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's; weights of a wrapped network, or of a module before it was nested, are refused with what to do."""
        mine = self.state_dict()
        known = [key for key in state_dict if key in mine]
        try:
            if known or strict or not state_dict:
                return super().load_state_dict(state_dict, strict, assign)
            error = RuntimeError("not one of their names is known here, so nothing would be loaded")
        except RuntimeError as found:
            error = found
        prefix = wrapped_in(state_dict, mine)
        strange = [key for key in (*state_dict, *mine) if key not in mine or key not in state_dict]
        odd = f"{strange[0]!r} is only in one of them" if strange and strict else str(error).splitlines()[-1].strip()
        raise NestlingError(
            f"these weights are not those of the nest {self.plan.name} ({odd}). "
            + (
                f"They are those of a network that is wrapped in another: take {prefix!r} off their names, {{key.removeprefix("
                f"{prefix!r}): value for key, value in state.items()}}"
                if prefix
                else "Weights that were saved before nesting go into the module, which is nested then: "
                "module.load_state_dict(state); net = nestling.nest(module, ...)"
            )
        ) from error

    def reset(self, generator: torch.Generator) -> "NestedNet":
        """Draw all weights anew from a generator: same seed, same network. Norms forget what they have seen."""
        for node in self.plan.nodes:
            if node.op.layered:
                node.op.reset(self.layer(node.name), generator)
        return self


class Alone(nn.Module):
    """A nested network of one answer, as an ordinary module: logits out."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor) -> Tensor: ...

    def __init__(self, net: NestedNet) -> None:
        super().__init__()
        self.net = net
        self.training = net.training

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.net(x)[-1]
        return answer


class Stage(nn.Module):
    """One stage of a network: takes the state the stage before left, gives its logits and the state it leaves."""

    def __init__(self, net: NestedNet, index: int) -> None:
        super().__init__()
        self.program = net.plan.programs[index]
        self.layers = nn.ModuleDict()
        self.cuts: list[Cut | None] = []
        for step in self.program.steps:
            node = step.node
            if node.op.layered:
                self.layers[node.name.replace(".", "/")] = cuttable(node, net.layer(node.name))
            self.cuts.append(make_cut(net.plan, step))

    def train(self, mode: bool = True) -> "Stage":
        """Only this stage's own mode: the layers are shared with the other stages."""
        self.training = mode
        return self

    def forward(self, state: State) -> tuple[Tensor, State]:
        if len(state) != len(self.program.takes):
            raise NestlingError(
                f"stage {self.program.stage} takes {len(self.program.takes)} tensors of state, found {len(state)}. "
                "Pass on the state that the stage before returned, or (x,) to the first."
            )
        unhooked(self.layers, f"stage {self.program.stage}")
        pieces = dict(zip(self.program.takes, state, strict=True))
        for step, cut in zip(self.program.steps, self.cuts, strict=True):
            reads = [fetch(pieces, runs) for runs in step.fetches]
            layer = self.layers[step.node.name.replace(".", "/")] if step.op.layered else None
            made = step.op.staged(layer, cut, reads, self.training)
            pieces[step.node.name, step.node.births[step.rows[0]]] = made
        head = pieces[self.program.head, self.program.stage]
        return head, tuple(pieces[key] for key in self.program.leaves)


def wrapped_in(state: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """What DataParallel, an average of weights or torch.compile have put before the names of these weights; "" where that is not
    all that is the matter."""
    first = next(iter(mine), "")
    found = [key.removesuffix(first) for key in state if first and key.endswith(f".{first}")]
    return next((each for each in found if all(f"{each}{key}" in state for key in mine)), "")


def follow(layer: nn.Module, source: nn.Module) -> None:
    """Give a layer the number type, the place, the mode and the frozen parameters of the one it is made after.

    A layer only, not what hangs below it by name."""
    theirs = dict(source.named_parameters(recurse=False))
    first = next(iter(theirs.values()), next(source.buffers(recurse=False), None))
    for name, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
        if first is not None:
            dtype = first.dtype if tensor.is_floating_point() else tensor.dtype
            tensor.data = tensor.data.to(device=first.device, dtype=dtype)
        if name in theirs:
            tensor.requires_grad_(theirs[name].requires_grad)
    layer.training = source.training


def cuttable(node: Node, layer: nn.Module) -> nn.Module:
    """A layer that knows how to compute some of its rows only, which one put in its place from outside may not."""
    if not node.op.given and not hasattr(layer, "births"):
        raise NestlingError(
            f"{node.name} has been replaced by a {type(layer).__name__}, which cannot be run stage by stage. Put back a nested "
            "layer (such as NestedBatchNorm2d) with its weights before asking for stages."
        )
    return has_its_weight(node.name, layer)


def has_its_weight(name: str, layer: Any) -> Any:
    """A layer whose weight is what it computes with: not one that a hook makes of others whenever the layer is called."""
    if layer._forward_pre_hooks and "weight" not in layer._parameters and hasattr(layer, "weight"):
        raise NestlingError(
            f"the weight of {name} is made by a hook when the layer is called (pruning, weight norm or the like), which a nest "
            "does not wait for: it would compute with an old one. Make it permanent, such as by torch.nn.utils.prune.remove, or "
            "do it to the module before it is nested."
        )
    return layer


def masked_layer(name: str, layer: Any) -> Any:
    """A convolution or linear layer of ours: one put in its place from outside would let early channels read later ones."""
    if not hasattr(layer, "mask"):
        raise NestlingError(
            f"{name} has been replaced by a {type(layer).__name__}, which knows no births: early stages would depend on later "
            "ones. Change the module before it is nested, or load weights into the nested layer."
        )
    return has_its_weight(name, layer)


def make_cut(plan: Plan, step: NodeWork) -> Cut | None:
    """Where the parameters of one step lie in the layer of its node."""
    return step.node.op.cut(step.node, plan.reads_of(step.node), step.rows, step.wanted[0])


def cut_state(
    plan: Plan, small: NestedNet, kept: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The entries of a network's state that a smaller network of the same nodes keeps."""
    cut = {}
    for key in small.state_dict():
        path, _, name = key.rpartition(".")
        while path not in plan.by_name:  # inside somebody else's module
            path, _, _ = path.rpartition(".")
        node = plan.by_name[path]
        cut[key] = node.op.kept(name, state[key], node, plan.reads_of(node), kept[path], kept[node.reads[0]])
    return cut


def fetch(pieces: Mapping[tuple[str, int], Tensor], runs: tuple[ChannelRun, ...]) -> Tensor:
    """Channels put together from stored pieces; a single whole piece is passed as it is."""
    parts = [
        pieces[r.node, r.birth] if r.whole else pieces[r.node, r.birth].narrow(r.axis, r.start, r.stop - r.start)
        for r in runs
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, runs[0].axis)


def last_uses(steps: Iterable[tuple[str, Iterable[str]]], kept: Collection[str]) -> dict[str, tuple[str, ...]]:
    """For each step, told as what it makes and what it reads, the values nobody needs after it: memory goes back early."""
    last = {name: made for made, reads in steps for name in (*reads, made)}
    freed: dict[str, tuple[str, ...]] = {}
    for name, made in last.items():
        if name not in kept:
            freed[made] = (*freed.get(made, ()), name)
    return freed


def check_input(plan: Plan, x: Tensor) -> None:
    expected = plan.input.shape(plan.input.channels)
    if tuple(x.shape[1:]) != expected:
        raise NestlingError(
            f"{plan.name} takes images of shape (N, {', '.join(map(str, expected))}); found {tuple(x.shape)}."
        )
