"""A nest as one would write it at first: every stripe of every layer a module of its own, trained through TorchJD.

In: a plan. Out: `Striped`, an ordinary module: the channels of a layer that are born at one stage are one nn.Conv2d over
the concatenation of all stripes born by then, with an nn.BatchNorm2d of their own; plain eager PyTorch. `step` is one
training step with it: by the mean of the losses (plain SGD), or by TorchJD's Jacobian and an aggregator. It computes the
function that NestedNet computes (`copied` gives it the same weights, a test compares); it knows nothing of our engines.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.nets import NestedNet, Plan
from nestling.nets.net import fetch
from nestling.nets.ops import BatchNorm, Conv, Linear
from nestling.nets.plan import NodeWork


def stripe(step: NodeWork) -> nn.Module | None:
    """The module of one stripe of one layer, where it has parameters."""
    op, channels = step.op, len(step.rows)
    if op.grouped or op.given or step.node.shares:
        raise ValueError(f"{step.node.name}: grouped, shared and foreign layers have no straightforward stripes")
    if isinstance(op, Conv):
        numbers: Any = (op.kernel, op.stride, op.padding, op.dilation, op.groups, op.bias)
        return nn.Conv2d(len(step.wanted[0]), channels, *numbers)
    if isinstance(op, Linear):
        return nn.Linear(len(step.wanted[0]), channels, bias=op.bias)
    return nn.BatchNorm2d(channels, op.eps, op.momentum) if isinstance(op, BatchNorm) else None


class Striped(nn.Module):
    """A nested network with one module per stripe; `net(x)` is a tuple of logits, one per stage."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.stripes = nn.ModuleDict()
        self.work: list[tuple[NodeWork, nn.Module | None]] = []
        for step in (step for program in plan.programs for step in program.steps):
            module = stripe(step)
            if module is not None:
                self.stripes[key(step)] = module
            self.work.append((step, module))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        pieces = {(self.plan.input.name, 1): x}
        for step, module in self.work:
            reads = [fetch(pieces, runs) for runs in step.fetches]
            pieces[step.node.name, step.node.births[step.rows[0]]] = compute(step, module, reads)
        return tuple(pieces[program.head, program.stage] for program in self.plan.programs)


def key(step: NodeWork) -> str:
    return f"{step.node.name}@{step.node.births[step.rows[0]]}".replace(".", "/")


def compute(step: NodeWork, module: nn.Module | None, reads: list[Tensor]) -> Tensor:
    """One stripe of one layer."""
    out: Tensor = step.op.compute(reads) if module is None else module(reads[0])
    return out


@torch.no_grad()
def copied(net: NestedNet) -> Striped:
    """The straightforward module with the weights and statistics of a nest."""
    made = Striped(net.plan)
    for step, module in made.work:
        if module is None:
            continue
        theirs, rows = net.layer(step.node.name), torch.tensor(step.rows)
        columns = torch.tensor(step.wanted[0])
        for name, value in theirs.state_dict().items():
            if name == "num_batches_tracked":
                continue
            part = value[rows][:, columns] if name == "weight" and step.op.weighted else value[rows]
            module.state_dict()[name].copy_(part)
    return made.train(net.training)


def stripes_step(
    net: Striped,
    optimizer: torch.optim.Optimizer,
    aggregator: Any = None,
    precision: str = "float32",
    chunk: int | None = 1,
) -> Callable[[Tensor, Tensor], Tensor]:
    """A training step. `aggregator` None: one backward of the mean loss. Otherwise TorchJD: one row per loss, `chunk` of
    them at a time (1: one backward each; None: all in one vectorised backward), then the aggregator."""
    parameters = list(net.parameters())
    device = parameters[0].device.type
    if aggregator is not None:
        from torchjd.autojac import backward, jac_to_grad

    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
            logits = net(x)
        losses = [F.cross_entropy(each.to(torch.promote_types(each.dtype, torch.float32)), y) for each in logits]
        if aggregator is None:
            (sum(losses[1:], losses[0]) / len(losses)).backward()
        else:
            backward(losses, inputs=parameters, parallel_chunk_size=chunk)
            jac_to_grad(parameters, aggregator)
        optimizer.step()
        return torch.stack([loss.detach() for loss in losses])

    return step
