"""The least time one training step can take: bytes at the measured copy bandwidth, operations at the measured rate.

In: a plan, a batch size and the two ceilings. Out: seconds, in three forms (see `floors`), for the un-nested network of the
same layers. Activations are bf16, and are read and written as often as they must be, never kept on the chip from layer to
layer. It measures nothing itself.
"""

from collections import Counter
from dataclasses import replace
from math import prod

from nestling.nets.ops import Conv, Map, Mean, Module, Zip
from nestling.nets.plan import Node, Plan

BF16 = 2  # bytes
OPTIMIZER = 6 * 4  # bytes a parameter: gradient written and read, weight and momentum read and written, float32


def elements(node: Node) -> int:
    """Of one image."""
    return node.channels * prod(node.size)


def conv_bytes(plan: Plan, node: Node) -> int:
    return 3 * BF16 * (elements(plan.by_name[node.reads[0]]) + elements(node)) if isinstance(node.op, Conv) else 0


def other_bytes(plan: Plan, node: Node, readers: int) -> int:
    """What the fused form adds for one node and one image."""
    moved = (readers - 1) * elements(node) if readers > 1 and node.reads else 0
    if node.op.layered and not node.op.weighted:
        moved += 3 * elements(node)
    elif isinstance(node.op, Zip):
        moved += (len(node.reads) - 1) * elements(node)
    elif isinstance(node.op, Map | Mean | Module) and node.op != Map("relu"):
        moved += 2 * (elements(plan.by_name[node.reads[0]]) + elements(node))
    return BF16 * moved


def operations(plan: Plan, node: Node) -> int:
    """Forward and both backward products of one image; a multiply-add is two. Every connection of the layer counts."""
    dense = replace(node, births=(plan.stages,) * node.channels)
    return 3 * 2 * sum(node.op.macs(dense, plan.reads_of(node)))


def floors(plan: Plan, batch: int, bandwidth: float, rate: float) -> dict[str, float]:
    """Seconds of one step.

    conv: convolutions alone. Forward reads the input and writes the output, and each of the two backward products moves
    two tensors of the same sizes: 3 x (input + output) bytes, 3 x 2 x MACs operations.

    fused: also what batch norm, sums and the optimizer cannot do without when all else is fused into the convolutions
    before and after (statistics where a tensor is written, normalising and ReLU where it is read). Each norm's input is
    then read three times more, all backward: once to mask and reduce the gradient, and once in each backward product of
    the layer below, which needs the gradient through the norm, known only after the reduction. The further operands of a
    sum are read; the gradients of a tensor's further readers are read to be added; pools read and write; the optimizer
    moves 24 bytes a parameter.

    In both, each layer takes the longer of its bytes and its operations, and layers follow one another: the floor is the
    sum over layers. lump, lower than any schedule can reach: conv with one maximum over the sums instead.
    """
    readers = Counter(read for node in plan.nodes for read in node.reads)
    conv = fused = 0.0
    for node in plan.nodes:
        work = operations(plan, node) * batch / rate
        bare = conv_bytes(plan, node) * batch / bandwidth
        conv += max(bare, work)
        fused += max(bare, work) + other_bytes(plan, node, readers[node.name]) * batch / bandwidth
    moved = sum(conv_bytes(plan, node) for node in plan.nodes) * batch
    worked = sum(operations(plan, node) for node in plan.nodes) * batch
    fused += OPTIMIZER * plan.dense()[0] / bandwidth
    return {"conv": conv, "fused": fused, "lump": max(moved / bandwidth, worked / rate)}
