"""conv.cu and hopper.cu on a CPU: compiled by the machine's C++ compiler with emulated.hpp instead of chip.cuh, and run through
narrow.py and hopper.py.

`TRITON_INTERPRET=1 python emulated_convs.py`; says what differed, or how many comparisons held.
"""

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestling.kernels import Fused, Kept, cuda, hopper, launch, narrow, proof
from nestling.kernels.forward import Unit
from nestling.nets import NestedNet, build
from nestling.nets.within import within
from nestling.recipes.recipe import NetworkRecipe

HERE = Path(__file__).parent
SHAPES = [(8, 8, 32), (16, 16, 32), (32, 32, 16), (8, 16, 16), (16, 32, 8), (32, 16, 8)]  # in, out, side
HOPPER_SHAPES = [(32, 32, 32), (16, 32, 16), (64, 64, 16), (128, 128, 8), (32, 64, 8)]


class Emulated:
    """A kernel as `cuda.Kernel` is one."""

    def __init__(self, file: str, name: str, threads: int, shared: int, sizes: tuple[tuple[str, int], ...]) -> None:
        self.threads, self.shared = threads, shared
        text = "".join(
            f'#include "{path}"\n' for path in (HERE / "emulated.hpp", cuda.HERE / "numbers.cuh", cuda.HERE / file)
        )
        text += f"static void entered(void** args) {{ call({name}, args); }}\n"
        text += 'extern "C" void go(int blocks, int layers, int threads, int shared, void** args)'
        text += "{ work = entered; launch(blocks, layers, threads, shared, args); }\n"
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
            source.write_text(text)
            macros = [f"-D{k}={v}" for k, v in sizes]
            words = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *macros, str(source), "-o", str(library)]
            subprocess.run(words, check=True)
            self.library = ctypes.CDLL(str(library))

    def __call__(self, blocks: int, *args: Any, layers: int = 1) -> None:
        given = cuda.as_c(args)
        places = (ctypes.c_void_p * len(given))(*(ctypes.addressof(each) for each in given))
        self.library.go(blocks, layers, self.threads, self.shared, places)


@cache
def kernel(
    _: torch.device, file: str, name: str, threads: int, shared: int, sizes: tuple[tuple[str, int], ...]
) -> Emulated:
    return Emulated(file, name, threads, shared, sizes)


def proofs(cin: int, cout: int, side: int, blocks: Any, back: Any, weights: Any) -> int:
    """What the kernels must show before they are used on a GPU."""
    like = torch.empty(4, cin, side, side, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    for adds, moments in ((True, True), (False, False)):
        assert proof.conv_agrees(like, cout, blocks, True, adds, moments), (cin, cout, side, adds, blocks)
    for before in (wider(like, cout), wider(like, cout + 8)[:, :cout]):
        assert proof.back_agrees(like, before, back), (cin, cout, side, back)
    tiles = like.shape[0] * side * side // weights.pixels(side)
    weights = weights._replace(splits=3 if tiles > 3 else 1)  # unequal shares, or several tiles one after another
    for x in (like, wider(like, 2 * cin)[:, :cin]):
        assert proof.weight_agrees(x, cout, weights), (cin, cout, side, weights)
    return 6


def wider(like: Tensor, channels: int) -> Tensor:
    images, _, side, _ = like.shape
    return torch.empty(images, channels, side, side, dtype=like.dtype).contiguous(memory_format=torch.channels_last)


def narrow_proofs(cin: int, cout: int, side: int) -> int:
    blocks = narrow.conv_blocks(side, cout)
    return proofs(cin, cout, side, blocks, blocks, narrow.weight_blocks(4, side, cout))


def hopper_proofs(cin: int, cout: int, side: int) -> int:
    there, back = (hopper.conv_patches(side, cin, cout, way) for way in (False, True))
    return proofs(cin, cout, side, there, back, hopper.weight_patches(4, side, cin, cout))


def several_layers() -> int:
    """Weights of three layers by one launch: each is what it is by itself."""
    held = 0
    for cin, cout, side in ((8, 16, 8), (64, 64, 8)):
        like = torch.empty(4, cin, side, side, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
        choice = proof.split_choices(like, cout)[0]
        assert isinstance(choice, launch.InCuda)
        xs, dys = ([proof.random_image(like, c, 10 * c + i) for i in range(3)] for c in (cin, cout))
        totals = [launch.room_for_weight(x, dy) for x, dy in zip(xs, dys, strict=True)]
        launch.weight_gradients(list(zip(xs, dys, totals, [None] * 3, strict=True)), choice)
        for x, dy, total in zip(xs, dys, totals, strict=True):
            assert torch.equal(total, launch.weight_gradient(x, dy, None, choice))
            held += 1
    return held


def not_a_number_shows() -> int:
    """A pixel that is not a number reaches its neighbours, and nobody else."""
    x = proof.random_image(torch.empty(1, 8, 8, 8, dtype=torch.bfloat16), 8, 4)
    x[0, 3, 4, 4] = float("nan")
    affine, weight = proof.random_affine(x, 8), proof.random_weight(x, 8, 8)
    _, y, _ = launch.norm_relu_conv(x, affine, weight, 8, tiles=narrow.conv_blocks(8, 8))
    expected = torch.zeros(8, 8, dtype=torch.bool)
    expected[3:6, 3:6] = True
    assert torch.equal(y.isnan()[0, 0], expected)
    return 1


def gradients(logits: tuple[Tensor, ...], net: NestedNet) -> Tensor:
    y = torch.arange(len(logits[0]))
    loss = sum((torch.nn.functional.cross_entropy(each, y) for each in logits), torch.zeros(()))
    found = torch.autograd.grad(loss, list(net.parameters()))
    return torch.cat([loss.detach().flatten(), *(each.flatten() for each in found)])


def whole_network() -> int:
    """All gradients of a network, in bf16: units, halving convolutions, sums, heads. Those of its own pass in float32."""
    recipe = NetworkRecipe(name="width-resnet42", blocks=(1, 1, 1), widths=(8, 16, 32))
    net = build(recipe, shape=(3, 32, 32), generator=torch.Generator().manual_seed(1))
    net = net.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    x = torch.randn((4, 3, 32, 32), generator=torch.Generator().manual_seed(2))
    fused = Fused(net)
    fused.stems.clear()  # Triton's own kernel, and its interpreter cannot multiply bf16
    assert sum(isinstance(item, Unit) and item.conv is not None for item in fused.items) == 6
    with torch.autocast("cpu", torch.bfloat16):
        logits = fused(x.contiguous(memory_format=torch.channels_last))
    alike = torch.nn.functional.cosine_similarity(gradients(logits, net), gradients(net(x), net), dim=0)
    assert alike > 0.9995, alike
    return 1


def part_of_a_network() -> int:
    """A subnetwork's gradients from the images of the whole network, whose first channels its own are: as from its own pass."""
    net = build(NetworkRecipe(name="width-resnet42", blocks=(1, 1, 1)), generator=torch.Generator().manual_seed(1))
    net = net.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    x = torch.randn((4, 3, 32, 32), generator=torch.Generator().manual_seed(2))
    x = x.contiguous(memory_format=torch.channels_last)
    whole, part = (Fused(within(net, stage)) for stage in (3, 1))
    for each in (whole, part):
        each.stems.clear()
    kept = Kept()
    with torch.autocast("cpu", torch.bfloat16):
        whole(x, kept=kept)
        known, alone = part(x, known=kept), part(x)
    alike = torch.nn.functional.cosine_similarity(gradients(known, part.net), gradients(alone, part.net), dim=0)
    assert alike > 0.9995, alike
    return 1


def main() -> None:
    cuda.available = lambda device: True  # type: ignore[assignment]
    cuda.is_hopper = lambda device: True  # type: ignore[assignment]
    cuda.kernel = kernel  # type: ignore[assignment]
    held = sum(narrow_proofs(*shape) for shape in SHAPES) + sum(hopper_proofs(*shape) for shape in HOPPER_SHAPES)
    held += several_layers() + not_a_number_shows() + whole_network() + part_of_a_network()
    print(f"{held} comparisons held")


if __name__ == "__main__":
    main()
