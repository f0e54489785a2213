"""What convolutions and linear layers have in common: every row reads, through a masked weight, what is born by then.

Weights are (rows, columns, *kernel) in every such layer, whatever torch's layout is: a mask, a stage's cut and a
subnetwork's part are then rows and columns of all of them. With groups, the columns are those of a row's group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from nestling.errors import NestlingError
from nestling.nets.births import Births
from nestling.nets.ops import lazy
from nestling.nets.ops.frozen import Op, own
from nestling.nets.ops.operation import Channels, Extent, Operation

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nestling.nets.layers import Cut
    from nestling.nets.plan import Node


@dataclass(frozen=True)
class WeightedOp(Operation):
    """An operation whose rows are weighted sums of the channels they may read."""

    kernel: tuple[int, ...] = field(default=(), kw_only=True)
    groups: int = field(default=1, kw_only=True)
    bias: bool = field(default=False, kw_only=True)

    weighted: ClassVar[bool] = True
    words: ClassVar[tuple[str, ...]] = ()  # the arguments of its function that follow input, weight and bias
    layered: ClassVar[bool] = True

    @classmethod
    def torch_layer(cls, weight: Tensor, bias: bool, options: dict[str, Any]) -> nn.Module:
        """The layer of torch.nn, still without weights, that its function on such a weight stands for."""
        raise NotImplementedError

    def reading(self, weight: Tensor, inputs: Tensor) -> Tensor:
        """Of the weight of torch's layer, what reads these input channels."""
        return weight[:, inputs]

    def reordered(self, name: str, value: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        rows, columns = rows.to(value.device), columns.to(value.device)
        if name != "weight" or self.groups > 1:  # of groups, those of one channel each: rows are all there is
            return value[rows]
        return self.reading(value, columns)[rows]

    # --- groups ---------------------------------------------------------------------------------------------------

    def group_of(self, node: Node, row: int) -> int:
        return row // (node.channels // self.groups)

    def inputs(self, reads: Sequence[Node], group: int) -> range:
        """The input channels that one group may read."""
        width = reads[0].channels // self.groups
        return range(group * width, (group + 1) * width)

    def is_depthwise(self, reads: Sequence[Node]) -> bool:
        """Whether each row reads one input channel only, so that it is born with it."""
        return self.groups > 1 and reads[0].channels == self.groups

    # --- planning -------------------------------------------------------------------------------------------------

    def births(self, node: Node, reads: Sequence[Node]) -> Births:
        return node.births

    def parents(self, node: Node, reads: Sequence[Node], row: int) -> tuple[Channels, ...]:
        births, birth = reads[0].births, node.births[row]
        return (tuple(c for c in self.inputs(reads, self.group_of(node, row)) if births[c] <= birth),)

    def tied(self, node: Node, reads: Sequence[Node], row: int) -> tuple[Channels, ...]:
        return ((self.group_of(node, row),) if self.is_depthwise(reads) else (),)

    def wants(self, node: Node, reads: Sequence[Node], rows: Channels, stage: int) -> tuple[Channels, ...]:
        births = reads[0].births
        groups = sorted({self.group_of(node, row) for row in rows})
        columns = tuple(c for g in groups for c in self.inputs(reads, g) if births[c] <= stage)
        if self.groups == 1:  # by birth, so that whole pieces are fetched however births are mixed
            columns = tuple(sorted(columns, key=lambda c: births[c]))
        return (columns,)

    def spread(self, node: Node, reads: Sequence[Node], mine: Sequence[int], theirs: Sequence[list[int]]) -> None:
        """A row reads every earlier channel of its group: gather by (group, birth) before spreading."""
        gathered: dict[tuple[int, int], int] = {}
        for row, owned in enumerate(mine):
            key = (self.group_of(node, row), node.births[row])
            gathered[key] = gathered.get(key, 0) | owned
        for (group, birth), owned in gathered.items():
            for channel in self.inputs(reads, group):
                if reads[0].births[channel] <= birth:
                    theirs[0][channel] |= owned

    def narrow(self, node: Node, rows: Channels, wanted: Sequence[Channels]) -> Operation:
        if self.groups == 1:
            return self
        return replace(self, groups=len({self.group_of(node, row) for row in rows}))

    def check(self, plan: str, node: Node, reads: Sequence[Node]) -> None:
        """A grouped layer can be cut into stages only if, at every stage, its groups grow alike."""
        super().check(plan, node, reads)
        if self.groups == 1:
            return
        births, size = reads[0].births, node.channels // self.groups
        parts = [node.births[g * size : (g + 1) * size] for g in range(self.groups)]
        inputs = [[births[c] for c in self.inputs(reads, g)] for g in range(self.groups)]
        for stage in sorted(set(node.births)):
            row_counts = {part.count(stage) for part in parts} - {0}
            column_counts = {
                sum(birth <= stage for birth in mine) for mine, part in zip(inputs, parts, strict=True) if stage in part
            }
            # D_stage by itself is a grouped layer too: all its groups need the same number of rows so far
            so_far = {sum(birth <= stage for birth in part) for part in parts} - {0}
            if len(row_counts) > 1 or len(column_counts) > 1 or len(so_far) > 1:
                raise NestlingError(
                    f"{plan}: the {self.groups} groups of {node.name} do not grow alike at stage {stage}: stripes cut "
                    "through groups. Use stripes that hold whole groups, or a number of groups that the stripes divide."
                )

    # --- counts ---------------------------------------------------------------------------------------------------

    def weights(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        births, pixels = reads[0].births, prod(self.kernel)
        memo: dict[tuple[int, int], int] = {}
        counts = []
        for row, birth in enumerate(node.births):
            key = (self.group_of(node, row), birth)
            if key not in memo:
                memo[key] = sum(births[c] <= birth for c in self.inputs(reads, key[0])) * pixels
            counts.append(memo[key])
        return tuple(counts)

    def params(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        return tuple(count + self.bias for count in self.weights(node, reads))

    def macs(self, node: Node, reads: Sequence[Node]) -> tuple[int, ...]:
        times = self.uses(node, reads)
        return tuple(count * times for count in self.weights(node, reads))

    def uses(self, node: Node, reads: Sequence[Node]) -> int:
        """How often each weight is multiplied, for one image."""
        return prod(node.size)

    # --- with tensors ---------------------------------------------------------------------------------------------

    def layer(self, node: Node, reads: Sequence[Node]) -> nn.Module:
        from nestling.nets.layers import Nested

        return Nested(self, reads[0].births, node.births)

    def draw(
        self, weight: Tensor, bias: Tensor | None, fan_in: Tensor, generator: torch.Generator | None = None
    ) -> None:
        """He's initialisation, every row with the fan-in that it really has."""
        scale = (2.0 / (fan_in * prod(self.kernel))).sqrt()
        weight.normal_(generator=generator).mul_(scale.view(-1, *[1] * (weight.dim() - 1)).to(weight))
        if bias is not None:
            bias.zero_()

    def reset(self, layer: Any, generator: torch.Generator) -> None:
        layer.reset_nested(generator)

    def whole(self, layer: Any, reads: Sequence[Tensor]) -> Tensor:
        """A layer that serves several places is used in each with that place's own stride, padding and dilation."""
        out: Tensor = layer(*reads, how=self)
        return out

    def cut(self, node: Node, reads: Sequence[Node], rows: Channels, columns: Channels) -> Cut:
        """Rows and columns of one step, as slices wherever the channels are consecutive."""
        from nestling.nets.layers import Cut, as_index

        if self.groups > 1:
            return Cut(lazy.torch.tensor(rows), self.table(node, reads, rows, columns))
        places = as_index(rows), as_index(columns)
        if all(isinstance(place, slice) for place in places):
            return Cut(*places)
        return Cut(lazy.torch.tensor(rows), lazy.torch.tensor(columns)[None, :])

    def table(self, node: Node, reads: Sequence[Node], rows: Channels, columns: Channels) -> Tensor:
        """For each of these rows, where in its group the input channels `columns` of its group stand."""
        width = reads[0].channels // self.groups
        places: dict[int, list[int]] = {}
        for column in columns:
            places.setdefault(column // width, []).append(column % width)
        return lazy.torch.tensor([places.get(self.group_of(node, row), []) for row in rows])

    def staged(self, layer: Any, cut: Cut | None, reads: Sequence[Tensor], training: bool) -> Tensor:
        assert cut is not None
        return self.compute(reads, cut.weight(layer.weight), None if layer.bias is None else layer.bias[cut.rows])

    # --- for a subnetwork -----------------------------------------------------------------------------------------

    @property
    def picks(self) -> bool:
        """Without groups, the weight has only the columns that are read."""
        return self.groups == 1

    @property
    def grouped(self) -> bool:
        return self.groups > 1

    def box(self, name: str, rows: Any, columns: Any) -> tuple[Any, ...]:
        return (rows, columns) if name == "weight" else (rows,)

    def kept(
        self, name: str, value: Tensor, node: Node, reads: Sequence[Node], rows: Channels, inputs: Channels
    ) -> Tensor:
        value = super().kept(name, value, node, reads, rows, inputs)
        if name != "weight" or len(inputs) == reads[0].channels:
            return value
        table = self.table(node, reads, rows, inputs).to(value.device)
        index = table.view(*table.shape, *[1] * (value.dim() - 2))
        return value.gather(1, index.expand(-1, -1, *value.shape[2:]))

    def freeze(self, layer: Any, cut: Cut | None, out: str, reads: tuple[str, ...], shape: Extent) -> list[Op]:
        assert cut is not None
        weight = own(cut.weight(layer.live_weight().cpu()))
        bias = None if layer.bias is None else own(layer.bias.cpu()[cut.rows])
        return [Op(self, out, reads, shape, weight, bias)]
