"""The fused training pass under Triton's interpreter, in float32, against the network's own: same answers, same gradients.

`TRITON_INTERPRET=1 python interpreted_fused.py`; says what differed, or how many comparisons held.
"""

import copy

import torch
from torch import Tensor

from nestling.fused import Fused
from nestling.fused.forward import Unit
from nestling.nets import NestedNet, build
from nestling.nets.within import within
from nestling.recipe import NetworkRecipe

CASES = {  # network -> stages to look at (0: the whole network, masked)
    NetworkRecipe(name="width-resnet42", blocks=(1, 1, 1), widths=(32, 32, 64)): (0, 1, 2),
    NetworkRecipe(name="even-resnet42", blocks=(1, 1, 1), widths=(32, 32, 64)): (3,),
    NetworkRecipe(name="depth-sparse98", blocks=(8, 8, 8), widths=(8, 16, 16)): (0, 2),
}


def loss(logits: tuple[Tensor, ...], y: Tensor) -> Tensor:
    return sum((torch.nn.functional.cross_entropy(each, y) for each in logits), torch.zeros(()))


def compare(net: NestedNet, stage: int, x: Tensor, y: Tensor) -> int:
    twin = copy.deepcopy(net)
    mine, theirs = (within(each, stage) if stage else each for each in (net, twin))
    fused = Fused(mine, torch.float32)
    assert sum(isinstance(item, Unit) and item.conv is not None for item in fused.items) > 2
    ours, reference = fused(x), theirs(x)
    held = 0
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        held += 1
    grads = (
        torch.autograd.grad(loss(each, y), list(n.parameters())) for each, n in ((ours, mine), (reference, theirs))
    )
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()) + 1e-6)
        held += 1
    for a, b in zip(net.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        held += 1
    return held


def main() -> None:
    held = 0
    for recipe, stages in CASES.items():
        torch.manual_seed(0)
        x = torch.randn(4, 3, 16, 16).contiguous(memory_format=torch.channels_last)
        y = torch.tensor([1, 2, 3, 4])
        for stage in stages:
            net = build(recipe, shape=(3, 16, 16), generator=torch.Generator().manual_seed(1))
            held += compare(net.to(memory_format=torch.channels_last).train(), stage, x, y)  # type: ignore[call-overload]
    print(f"{held} comparisons held")


if __name__ == "__main__":
    main()
