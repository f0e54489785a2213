"""A trained network with stages added to it: its own layers stay as they came, and only what is new is trained.

In: a plan, its layers, and which of its nodes are the network's own. Out: a NestedNet in which these are frozen and stay in
evaluation whatever mode the rest is in. What is added, and where, is said by exits.py and keep.py.
"""

from collections.abc import Iterable

import torch
from torch import nn

from nestling.errors import NestlingError
from nestling.nets.net import NestedNet, attach
from nestling.nets.plan import Plan


class Extended(NestedNet):
    """A nested network of which some layers, the `backbone`, are somebody's own and stay as they came."""

    _own: tuple[str, ...] = ()  # the nodes of what is somebody's own
    _backbone: tuple[str, ...] = ()  # those that have layers
    _readers: tuple[str, ...] = ()  # new layers by which they read earlier stages: zero at first
    _held = True  # whether the backbone is frozen
    _copied: tuple[str, ...] = ()  # layers of it that stand in several places as copies

    def hold(self, backbone: Iterable[str], reads: Iterable[str] = ()) -> "Extended":
        """Say which layers are the backbone; from now on they stay as they are, and all others train."""
        self._own = tuple(backbone)
        self._backbone = tuple(name for name in self._own if self.plan.by_name[name].op.layered)
        self._readers, self._held = tuple(reads), True
        return self.requires_grad_(True).train(self.training)

    def requires_grad_(self, requires_grad: bool = True) -> "Extended":
        """Of what was added; the backbone is frozen until `thaw`."""
        super().requires_grad_(requires_grad)
        for parameter in self.own_parameters() if self._held else ():
            parameter.requires_grad_(False)
        return self

    def thaw(self) -> "Extended":
        """Let everything train, the backbone too: its answers will change."""
        if self._copied:
            raise NestlingError(
                f"{self.plan.name}: the weights of {', '.join(self._copied)} serve several places, each of which has a copy "
                "here; trained, these would go their own ways. Train the module before it gets exits"
            )
        self._held = False
        self.requires_grad_(True)
        return self.train(self.training)

    def train(self, mode: bool = True) -> "Extended":
        super().train(mode)
        for layer in self.own_layers() if self._held else ():
            layer.eval()
        return self

    def own_layers(self) -> list[nn.Module]:
        """The modules of the backbone, without those that merely hang below one by name."""
        found: list[nn.Module] = []
        for name in self._backbone:
            layer = self.layer(name)
            found += list(layer.modules()) if self.plan.by_name[name].op.given else [layer]
        return found

    def own_parameters(self) -> list[nn.Parameter]:
        return [p for layer in self.own_layers() for p in layer.parameters(recurse=False)]

    def new_parameters(self) -> list[nn.Parameter]:
        """What was added, for an optimizer: `torch.optim.SGD(net.new_parameters(), 0.1)`."""
        own = {id(p) for p in self.own_parameters()}
        return [p for p in self.parameters() if id(p) not in own]

    @property
    def overhead(self) -> float:
        """The multiply-accumulates of all that was added, as a share of the network's own."""
        nodes = [self.plan.by_name[name] for name in self._own]
        own = sum(self.plan.row_macs(node, row) for node in nodes for row in range(node.channels))
        return self.plan.macs(self.plan.stages) / own - 1

    @property
    def apart(self) -> bool:
        """Whether the last stage is the backbone and nothing else, so that no other stage shares anything with it."""
        own = set(self._backbone)
        alone = all(node.name in own for node in self.plan.restrict(self.plan.stages).nodes if node.op.layered)
        return (
            self._held
            and alone
            and not any(self.plan.owners[name][0] & ~(1 << len(self.plan.heads) - 1) for name in own)
        )

    def reset(self, generator: torch.Generator) -> "Extended":
        """Draw what was added anew; the backbone is somebody's own."""
        for node in self.plan.nodes:
            if node.op.layered and node.name not in self._backbone:
                node.op.reset(self.layer(node.name), generator)
        self.read_nothing()
        return self

    def read_nothing(self) -> None:
        """The backbone computes what it always did, until these weights are trained."""
        for name in self._readers:
            self.layer(name).weight.data.zero_()


def over(plan: Plan, net: NestedNet) -> NestedNet:
    """A part of a network as a network of its own, of the very same layers."""
    layers = {node.name: net.layer(node.name) for node in plan.nodes if node.op.layered and not node.shares}
    made = NestedNet(plan, layers)
    for name, layer in layers.items():
        attach(made, name, layer)
    made.training = net.training
    return made
