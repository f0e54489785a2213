"""The fused training pass under Triton's interpreter, in float32, against the network's own: same answers, same gradients.

`TRITON_INTERPRET=1 python interpreted_fused.py`; says what differed, or how many comparisons held.
"""

import copy
import itertools
from unittest import mock

import torch
from torch import Tensor

from nestling.gradients.combiners.greedy import Greedy
from nestling.kernels import Fused, Kept, elementwise, proof
from nestling.kernels.autograd import Done, NormRelu, NormReluConv, Weight
from nestling.kernels.backends import Choice, choices, triton
from nestling.kernels.patterns import Unit
from nestling.kernels.side_stream import SideStream
from nestling.nets import NestedNet, build
from nestling.nets.within import within
from nestling.recipes.recipe import NetworkRecipe

SHAPES = [(c * k, side) for k in (1, 2, 4) for c, side in ((8, 32), (16, 16), (32, 8))]
CASES = {  # network -> stages to look at (0: the whole network, masked)
    NetworkRecipe(name="width-resnet42", blocks=(1, 1, 1), widths=(32, 32, 64)): (0, 1, 2),
    NetworkRecipe(name="even-resnet42", blocks=(1, 1, 1), widths=(32, 32, 64)): (3,),
    NetworkRecipe(name="depth-sparse98", blocks=(8, 8, 8), widths=(8, 16, 16)): (0, 2),
}


def loss(logits: tuple[Tensor, ...], y: Tensor) -> Tensor:
    return sum((torch.nn.functional.cross_entropy(each, y) for each in logits), torch.zeros(()))


def gradients(logits: tuple[Tensor, ...], net: NestedNet, y: Tensor) -> tuple[Tensor, ...]:
    """Zero where a loss does not depend on a parameter."""
    parameters = list(net.parameters())
    return torch.autograd.grad(loss(logits, y), parameters, retain_graph=True, materialize_grads=True)


def handed_on() -> int:
    """A loss that reads only what a norm has handed on gets its gradient past the norm, as if that were not there."""
    z, gamma, beta = (torch.randn(shape, requires_grad=True) for shape in ((4, 8, 8, 8), (8,), (8,)))
    z_laid = z.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(8, 8, 3, 3, requires_grad=True)
    packed = weight.detach().permute(0, 2, 3, 1).reshape(-1)
    done = Done(z_laid.detach(), torch.ones(4, 8), torch.zeros_like(z_laid), torch.zeros_like(z_laid))
    *_, first = NormRelu.apply(z_laid, gamma, beta, done)
    read = Weight(packed, None, SideStream(z.device))
    *_, second = NormReluConv.apply(first, gamma, beta, weight, None, done, read)
    found = torch.autograd.grad((3 * second).sum(), (z, gamma, weight), materialize_grads=True)
    for a, expected in zip(found, (3.0, 0.0, 0.0), strict=True):
        torch.testing.assert_close(a, torch.full_like(a, expected))
    return len(found)


def proofs() -> int:
    """What the kernels must show before they are used on a GPU, shown here; and that wrong numbers would be noticed."""
    held = 0
    like = torch.empty(4, 8, 8, 8).contiguous(memory_format=torch.channels_last)
    for cout in (8, 16):
        (choice, *_), (splits, *_) = (choices(kernel, like, cout) for kernel in ("forward", "weights"))
        for normed, adds, moments in itertools.product((False, True), repeat=3):
            assert proof.forward_agrees(like, cout, choice, normed, adds, moments)
            held += 1
        for before in (like_of(like, cout), like_of(like, cout + 8)[:, :cout]):
            assert proof.back_agrees(like, before, choice)
        for wide in (like, like_of(like, 24)[:, :8]):
            assert proof.weight_agrees(wide, cout, splits)
        held += 4
    held += sum(tiles_of_many_images(channels, side) for channels, side in SHAPES) + stems(like)
    image = proof.random_image(like, 8, 0)
    found = elementwise.moments_of(image)
    assert proof.moments_agree(found, image)
    for wrong in (found * torch.tensor([1.0, 1.1]).view(2, 1, 1), found * torch.tensor([1.1, 1.0]).view(2, 1, 1)):
        assert not proof.moments_agree(wrong, image)
    return held + 3


def like_of(like: Tensor, channels: int) -> Tensor:
    return torch.empty(len(like), channels, *like.shape[2:]).contiguous(memory_format=torch.channels_last)


def stems(like: torch.Tensor) -> int:
    """Few inputs, many outputs."""
    pictures = like[:, :3].contiguous(memory_format=torch.channels_last)
    for cout in (16, 72, 128):
        assert proof.weight_agrees(pictures, cout, choices("weights", pictures, cout)[0]), cout
    return 3


def tiles_of_many_images(channels: int, side: int) -> int:
    """The tiles that 128 images get, on fewer images."""
    like, pixels = torch.empty(2, channels, 16, 16).contiguous(memory_format=torch.channels_last), 128 * side**2
    there, back = (Choice(triton, triton.conv_tiles(pixels, channels, channels, way)) for way in (False, True))
    assert proof.forward_agrees(like, channels, there, normed=True, adds=True, moments=True)
    assert proof.back_agrees(like, like, back)
    splits = Choice(triton, triton.weight_splits(pixels, channels, channels, 132))
    assert proof.weight_agrees(like, channels, splits)
    assert proof.weight_agrees(like_of(like, 2 * channels)[:, :channels], channels, splits)
    return 4


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
    for heads in (slice(None), *(slice(s, s + 1) for s in range(len(ours)))):  # all losses at once, then one by one
        grads = (gradients(each[heads], n, y) for each, n in ((ours, mine), (reference, theirs)))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()) + 1e-6)
            held += 1
    for a, b in zip(net.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        held += 1
    return held + (known_already(net, fused, x, y) if 0 < stage < net.plan.answering[-1] else 0)


def known_already(net: NestedNet, fused: Fused, x: Tensor, y: Tensor) -> int:
    """A subnetwork that finds its images among the whole network's: same answers and gradients, no convolution done twice."""
    kept = Kept()
    Fused(within(net, net.plan.answering[-1]), torch.float32)(x, kept=kept)
    with mock.patch.object(elementwise, "finish_moments", wraps=elementwise.finish_moments) as computed:
        found = fused(x, known=kept)
    units = [unit for unit in fused.items if isinstance(unit, Unit)]
    own = [unit for unit in units if (unit.norm.name, unit.gives) not in kept.units]
    assert computed.call_count == len(own) < len(units)
    held = 0
    alone = fused(x)
    pairs = zip((*found, *gradients(found, fused.net, y)), (*alone, *gradients(alone, fused.net, y)), strict=True)
    for a, b in ((one.detach(), other.detach()) for one, other in pairs):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()) + 1e-6)
        held += 1
    return held


def greedily(net: NestedNet, stage: int, x: Tensor, y: Tensor) -> int:
    """Greedy training of one stage: what others own keeps its statistics, however far from its batch, and what the stage
    trains has the same gradients."""
    for name, buffer in net.named_buffers():
        if name.endswith("running_var"):
            buffer.fill_(0.5)
    twin = copy.deepcopy(net)
    held, answers, found = 0, list[tuple[Tensor, ...]](), list[list[Tensor]]()
    for each, forward in ((net, Fused(net, torch.float32)), (twin, twin)):
        greedy = Greedy(each, torch.optim.SGD(each.parameters(), lr=0.1))
        greedy.start(stage)
        answers.append(forward(x))
        greedy.backward([torch.nn.functional.cross_entropy(logits, y) for logits in answers[-1]])
        found.append([torch.zeros_like(p) if p.grad is None else p.grad for p in each.parameters()])
        greedy.close()
    assert any(bool(grad.any()) for grad in found[0])
    pairs = [*zip(*answers, strict=True), *zip(*found, strict=True), *zip(net.buffers(), twin.buffers(), strict=True)]
    for a, b in ((one.detach(), other.detach()) for one, other in pairs):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()) + 1e-6)
        held += 1
    return held


def main() -> None:
    held = handed_on() + proofs()
    for recipe, stages in CASES.items():
        torch.manual_seed(0)
        x = torch.randn(4, 3, 16, 16).contiguous(memory_format=torch.channels_last)
        y = torch.tensor([1, 2, 3, 4])
        for stage in stages:
            net = build(recipe, shape=(3, 16, 16), generator=torch.Generator().manual_seed(1))
            held += compare(net.to(memory_format=torch.channels_last).train(), stage, x, y)  # type: ignore[call-overload]
        for stage in (1, 2):
            held += greedily(net, stage, x, y)
    held += nan_shows()
    print(f"{held} comparisons held")


def nan_shows() -> int:
    """One pixel that is not a number: every loss is not a number either, as with torch's own relu."""
    net = build(next(iter(CASES)), shape=(3, 16, 16), generator=torch.Generator().manual_seed(1)).train()
    x = torch.randn(4, 3, 16, 16)
    x[0, 0, 3, 3] = torch.nan
    found = Fused(net.to(memory_format=torch.channels_last), torch.float32)(x)  # type: ignore[call-overload]
    assert all(bool(loss((logits,), torch.zeros(4, dtype=torch.int64)).isnan()) for logits in found)
    return len(found)


if __name__ == "__main__":
    main()
