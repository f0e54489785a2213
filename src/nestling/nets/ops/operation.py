"""What an operation is: everything that is asked of one, answered for an operation that treats each channel by itself.

An operation is a frozen dataclass of its own parameters. The planning half (births, shapes, counts, which channels a row
reads) is pure. The other half computes, freezes and writes; it alone uses torch, which lazy.py imports. `node` is always
the node that does the operation, `reads` the nodes it reads, `rows` some of its output channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from nestling.errors import NestlingError
from nestling.nets.births import Births
from nestling.nets.ops import lazy
from nestling.nets.ops.frozen import OnnxWriter, Op

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nestling.nets.layers import Cut
    from nestling.nets.plan import Node

Extent = tuple[int, ...]
Channels = tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """One operation. Its answers hold for all rows of a node; `narrow` gives the same operation over some of them."""

    axis: int = field(default=1, kw_only=True)  # where the channels stand in what it gives; the batch is 0

    kind: ClassVar[str] = ""
    modules: ClassVar[tuple[str, ...]] = ()  # the layers of torch.nn that do it
    functions: ClassVar[tuple[str, ...]] = ()  # the functions of torch.nn.functional that do it with given weights
    weighted: ClassVar[bool] = False  # rows read many channels through a masked weight, and their births are a choice
    layered: ClassVar[bool] = False  # there is a module that holds its parameters
    joins: ClassVar[bool] = False  # it puts several tensors together
    tail: ClassVar[bool] = False  # it may follow a classifier
    given: ClassVar[bool] = False  # that module is somebody else's, handed over by name

    # --- from torch -----------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, layer: Any, read: Node) -> Operation:
        """What a layer of torch.nn does to what it reads. Where that cannot be nested, NestlingError says why."""
        raise NotImplementedError

    def apart(self, layer: Any) -> tuple[nn.Module | None, Operation]:
        """What torch's layer does first that is no part of this operation, as a module of its own, and what is left."""
        return None, self

    # --- what it gives --------------------------------------------------------------------------------------------

    def channels(self, reads: Sequence[Node]) -> int:
        return reads[0].channels

    def size(self, reads: Sequence[Node]) -> Extent:
        return reads[0].size

    def births(self, node: Node, reads: Sequence[Node]) -> Births:
        """What is computed channel by channel is born with the latest of what it reads."""
        found = []
        for row in range(node.channels):
            parents = self.parents(node, reads, row)
            found.append(max(read.births[c] for read, mine in zip(reads, parents, strict=True) for c in mine))
        return tuple(found)

    # --- which channels a row reads -------------------------------------------------------------------------------

    def parents(self, node: Node, reads: Sequence[Node], row: int) -> tuple[Channels, ...]:
        """The channels of each read that one row is computed from."""
        return ((row,),) * len(reads)

    def tied(self, node: Node, reads: Sequence[Node], row: int) -> tuple[Channels, ...]:
        """Those that the row must be born together with; none of them if its birth is a choice."""
        return self.parents(node, reads, row)

    def wants(self, node: Node, reads: Sequence[Node], rows: Channels, stage: int) -> tuple[Channels, ...]:
        """The channels of each read that `stage` needs for these rows, in the order in which it fetches them."""
        found: list[dict[int, None]] = [{} for _ in reads]  # without repeats: flatten asks for a channel once per pixel
        for row in rows:
            for seen, mine in zip(found, self.parents(node, reads, row), strict=True):
                seen.update(dict.fromkeys(mine))
        return tuple(tuple(seen) for seen in found)

    def spread(self, node: Node, reads: Sequence[Node], mine: Sequence[int], theirs: Sequence[list[int]]) -> None:
        """Hand the owners of each row on to the channels that it reads."""
        for row, owned in enumerate(mine):
            if owned:
                for bits, channels in zip(theirs, self.parents(node, reads, row), strict=True):
                    for channel in channels:
                        bits[channel] |= owned

    def told(self, node: Node, reads: Sequence[Node]) -> Operation:
        """The operation that knows the births it was planned with, where these say what it computes."""
        return self

    def untold(self, plan: str, node: Node, reads: Sequence[Node]) -> Operation:
        """The operation before that, for other births."""
        return self

    def narrow(self, node: Node, rows: Channels, wanted: Sequence[Channels]) -> Operation:
        """The operation over these rows, where only the channels `wanted` of each read are there, in that order."""
        return self

    def check(self, plan: str, node: Node, reads: Sequence[Node]) -> None:
        """Refuse what this operation cannot do."""
        for read in reads:
            if read.op.axis != self.axis or not (self.any_axis or self.axis == 1):
                raise NestlingError(
                    f"{plan}: {node.name} ({self.kind}) reads {read.name}, whose channels stand at axis {read.op.axis}, and "
                    f"gives its own at axis {self.axis}; expected {'the same axis' if self.any_axis else 'axis 1'} for both."
                )

    @property
    def any_axis(self) -> bool:
        """Whether its channels may stand elsewhere than behind the batch."""
        return False

    # --- counts, row by row ---------------------------------------------------------------------------------------

    def weights(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        """How many weights connect each row to what it reads; masked ones do not count."""
        return (0,) * node.channels

    def params(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        return (0,) * node.channels

    def macs(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        """Multiply-accumulates of convolutions and linear layers; other operations count none."""
        return (0,) * node.channels

    # --- with tensors ---------------------------------------------------------------------------------------------

    def layer(self, node: Node, reads: Sequence[Node]) -> nn.Module | None:
        """A new module that holds its parameters."""
        return None

    def reset(self, layer: Any, generator: torch.Generator) -> None:
        """As a new layer is."""
        if self.layered:
            layer.reset_parameters()

    def compute(self, reads: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """What comes out, for the rows that the weights are of."""
        raise NotImplementedError

    def whole(self, layer: Any, reads: Sequence[Tensor]) -> Tensor:
        """All rows at once; a masked weight may follow what is read."""
        out: Tensor = self.compute(reads) if layer is None else layer(*reads)
        return out

    def cut(self, node: Node, reads: Sequence[Node], rows: Channels, columns: Channels) -> Cut | None:
        """Where the parameters of some rows lie in the layer."""
        if not self.layered:
            return None
        from nestling.nets.layers import Cut, as_index

        return Cut(as_index(rows), slice(0))

    def staged(self, layer: Any, cut: Cut | None, reads: Sequence[Tensor], training: bool) -> Tensor:
        """The rows of a cut, by the operation narrowed to them."""
        return self.compute(reads)

    # --- for a subnetwork -----------------------------------------------------------------------------------------

    @property
    def picks(self) -> bool:
        """Whether it finds the channels it needs in whatever it reads, so that nobody need leave the others out."""
        return False

    @property
    def grouped(self) -> bool:
        """Whether its channels fall into groups that are computed apart."""
        return False

    def box(self, name: str, rows: Any, columns: Any) -> tuple[Any, ...]:
        """Where the part of a subnetwork lies in a parameter."""
        return (rows,)

    def kept(
        self, name: str, value: Tensor, node: Node, reads: Sequence[Node], rows: Channels, inputs: Channels
    ) -> Tensor:
        """What a subnetwork keeps of a tensor of the layer's state."""
        return value[lazy.torch.tensor(rows, device=value.device)] if value.dim() else value

    def adopted(self, name: str, value: Tensor, node: Node) -> Tensor:
        """A tensor of the state of torch's own layer as our layer has it."""
        return value

    def given_back(self, name: str, value: Tensor) -> Tensor:
        """A tensor of our layer's state as torch's own layer has it: `adopted`, undone."""
        return value

    def reordered(self, name: str, value: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """A tensor of the state of torch's own layer, with its channels and those it reads moved: which stands where."""
        return value.reshape(-1)[rows.to(value.device)].view(value.shape) if value.numel() == len(rows) else value

    # --- frozen, and as ONNX --------------------------------------------------------------------------------------

    def freeze(self, layer: Any, cut: Cut | None, out: str, reads: tuple[str, ...], shape: Extent) -> list[Op]:
        """The narrowed operation with its own copy of its weights, as operations of a frozen stage."""
        return [Op(self, out, reads, shape)]

    def write(self, graph: OnnxWriter, op: Op) -> None:
        """Its ONNX form."""
        raise NotImplementedError
