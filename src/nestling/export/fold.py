"""Frozen programs made faster, without changing what they compute.

`fold` puts a batch norm into the convolution before it where nothing else reads that convolution. `merge` lets a stage pass
on the joined channels it has already put together, so that the next joins two tensors instead of all pieces. `split`
turns a convolution over a joined tensor that nobody else needs into two convolutions and a sum, which saves the joining.
"""

from dataclasses import replace

from torch import Tensor

from nestling.export.freeze import Frozen, wire
from nestling.nets.ops.batchnorm import Affine
from nestling.nets.ops.cat import Cat
from nestling.nets.ops.conv import Conv
from nestling.nets.ops.frozen import Op, own
from nestling.nets.ops.zip import Zip

BLOCK = 16  # channels in a block of the fast layouts of ONNX Runtime; smaller parts would be filled up with zeros


def fold(stages: tuple[Frozen, ...]) -> tuple[Frozen, ...]:
    """Scale and shift go into the convolution or linear layer before them if nothing else, in any stage, reads it."""
    readers: dict[str, int] = {}
    for stage in stages:
        for name in (stage.head, *stages[-1].gives, *(read for op in stage.ops for read in op.reads)):
            readers[name] = readers.get(name, 0) + 1
    folded = []
    for stage in stages:
        made = {op.out: op for op in stage.ops}
        ops = []
        for op in stage.ops:
            if isinstance(op.does, Affine):
                before = made.get(op.reads[0])
                alone = before is not None and before.does.weighted and readers[before.out] == 1
                op = absorb(before, op) if before is not None and alone else rounded(op)
            ops.append(op)
        folded.append(replace(stage, ops=tuple(ops)))
    return wire(tuple(folded), stages[-1].gives)


def absorb(layer: Op, affine: Op) -> Op:
    """One layer that does what the layer and then the affine map did."""
    assert layer.weight is not None and affine.weight is not None and affine.bias is not None
    scale = affine.weight.view(-1, *[1] * (layer.weight.dim() - 1))
    bias = affine.bias if layer.bias is None else affine.bias + layer.bias.double() * affine.weight
    return replace(layer, out=affine.out, weight=own(layer.weight.double() * scale), bias=own(bias))


def rounded(affine: Op) -> Op:
    assert affine.weight is not None and affine.bias is not None
    return replace(affine, weight=own(affine.weight), bias=own(affine.bias))


def merge(stages: tuple[Frozen, ...]) -> tuple[Frozen, ...]:
    """Where a stage joins what an earlier stage has joined already and something new, it takes that and the new."""
    joined: dict[tuple[str, ...], str] = {}  # the pieces, and the name of their join, from earlier stages
    merged = []
    for stage in stages:
        ops: list[Op] = []
        known: dict[str, str] = {}  # joins of this stage that an earlier one has made already
        for op in stage.ops:
            if isinstance(op.does, Cat):
                count = next((k for k in range(len(op.reads), 1, -1) if op.reads[:k] in joined), 0)
                if count == len(op.reads) and op.out not in (stage.head, *stage.gives):
                    known[op.out] = joined[op.reads]
                    continue
                if count:
                    op = replace(op, reads=(joined[op.reads[:count]], *op.reads[count:]))
            ops.append(replace(op, reads=tuple(known.get(read, read) for read in op.reads)))
        merged.append(replace(stage, ops=tuple(ops)))
        joined |= {op.reads: op.out for op in stage.ops if isinstance(op.does, Cat) and op.out not in known}
    return wire(tuple(merged))


def split(stages: tuple[Frozen, ...], block: int = BLOCK) -> tuple[Frozen, ...]:
    """Convolutions over a join of two that no other operation and no later stage reads, as two convolutions and a sum."""
    parted = []
    for stage in stages:
        made = {op.out: op for op in stage.ops}
        readers = [read for op in stage.ops for read in op.reads]
        shape = {op.out: op.shape for op in stage.ops}
        ops: list[Op] = []
        for op in stage.ops:
            join = made.get(op.reads[0])
            joined = join is not None and isinstance(join.does, Cat) and len(join.reads) == 2
            if join is None or not joined or not isinstance(op.does, Conv) or op.does.grouped:
                ops.append(op)
                continue
            new = shape.get(join.reads[1], (0,))[0]
            old = join.shape[0] - new
            needed = readers.count(join.out) > 1 or join.out in stage.gives
            ops += [op] if needed or not new or old % block or new % block else halves(op, join, old)
        parted.append(replace(stage, ops=tuple(ops)))
    return wire(tuple(parted))


def halves(op: Op, join: Op, old: int) -> list[Op]:
    assert op.weight is not None
    left: Tensor = op.weight[:, :old].contiguous()
    right: Tensor = op.weight[:, old:].contiguous()
    first = replace(op, out=f"{op.out}/old", reads=(join.reads[0],), weight=left, bias=None)
    second = replace(op, out=f"{op.out}/new", reads=(join.reads[1],), weight=right)
    return [first, second, Op(Zip("add"), op.out, (first.out, second.out), op.shape)]
