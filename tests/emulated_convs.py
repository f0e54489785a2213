"""sm80.cu and sm90.cu on a CPU: compiled by the machine's C++ compiler with emulated.hpp instead of ptx.cuh, and run through
sm80.py and sm90.py.

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

from nestling.kernels import Fused, Kept, chip, nvrtc, proof
from nestling.kernels.backends import Choice, choices, sm80, sm90
from nestling.kernels.patterns import Unit
from nestling.kernels.weights import empty_gradient, weight_gradient, weight_gradients
from nestling.nets import NestedNet, build
from nestling.nets.within import within
from nestling.recipes.recipe import NetworkRecipe

HERE = Path(__file__).parent
SHAPES = {  # in, out, side
    sm80: [(8, 8, 32), (16, 16, 32), (32, 32, 16), (8, 16, 16), (16, 32, 8), (32, 16, 8)],
    sm90: [(32, 32, 32), (64, 64, 16), (128, 128, 8), (32, 64, 8)],
}
SIXTEEN = {
    "forward": (1, 16, 2, 3),
    "back": (1, 16, 2, 3),
    "weights": (1, 8, 1, 3, 4, 16),
}  # what sm90.cu can do, but is not asked


class Emulated:
    """A kernel as `nvrtc.Kernel` is one."""

    def __init__(self, file: str, name: str, threads: int, shared: int, macros: nvrtc.Macros) -> None:
        self.threads, self.shared = threads, shared
        headers = [nvrtc.SOURCES / name for name in nvrtc.HEADERS if name != "ptx.cuh"]
        text = "".join(f'#include "{path}"\n' for path in (HERE / "emulated.hpp", *headers, nvrtc.SOURCES / file))
        text += f"static void entered(void** args) {{ call({name}, args); }}\n"
        text += 'extern "C" void go(int blocks, int layers, int threads, int shared, void** args)'
        text += "{ work = entered; launch(blocks, layers, threads, shared, args); }\n"
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
            source.write_text(text)
            given = [f"-D{k}={v}" for k, v in macros]
            words = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *given, str(source), "-o", str(library)]
            subprocess.run(words, check=True)
            self.library = ctypes.CDLL(str(library))

    def __call__(self, blocks: int, *args: Any, layers: int = 1) -> None:
        given = nvrtc.as_c(args)
        places = (ctypes.c_void_p * len(given))(*(ctypes.addressof(each) for each in given))
        self.library.go(blocks, layers, self.threads, self.shared, places)


@cache
def kernel(_: torch.device, file: str, name: str, threads: int, shared: int, macros: nvrtc.Macros) -> Emulated:
    return Emulated(file, name, threads, shared, macros)


def proofs(backend: Any, cin: int, cout: int, side: int) -> int:
    """What the kernels must show before they are used on a GPU."""
    like = wider(torch.empty(4, 1, side, side, dtype=torch.bfloat16), cin)
    there, back, weights = (chosen(backend, kernel, like, cout) for kernel in ("forward", "back", "weights"))
    for adds, moments in ((True, True), (False, False)):
        assert proof.forward_agrees(like, cout, there, True, adds, moments), (cin, cout, side, adds, there)
    for before in (wider(like, cout), wider(like, cout + 8)[:, :cout]):
        assert proof.back_agrees(like, before, back), (cin, cout, side, back)
    tiles = like.shape[0] * side * side // weights.tiles.pixels(side)
    splits = 3 if tiles > 3 else 1  # unequal shares, or several tiles one after another
    weights = weights._replace(tiles=weights.tiles._replace(splits=splits))
    for x in (like, wider(like, 2 * cin)[:, :cin]):
        assert proof.weight_agrees(x, cout, weights), (cin, cout, side, weights)
    return 6


def chosen(backend: Any, kernel: Any, like: Tensor, cout: int) -> Choice:
    """The tiles in use; sm90.cu can also do 16 channels, which sm80.cu does."""
    if backend is sm90 and like.shape[1] == 16:
        return Choice(sm90, sm90.Tiles(*SIXTEEN[kernel]))
    return Choice(backend, backend.tiles(kernel, like, cout)[0])


def wider(like: Tensor, channels: int) -> Tensor:
    images, _, side, _ = like.shape
    return torch.empty(images, channels, side, side, dtype=like.dtype).contiguous(memory_format=torch.channels_last)


def several_layers() -> int:
    """Weights of three layers by one launch: each is what it is by itself."""
    held = 0
    for cin, cout, side in ((8, 16, 8), (64, 64, 8)):
        like = torch.empty(4, cin, side, side, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
        choice = choices("weights", like, cout)[0]
        assert choice.backend in (sm80, sm90)
        xs, dys = ([proof.random_image(like, c, 10 * c + i) for i in range(3)] for c in (cin, cout))
        totals = [empty_gradient(x, dy) for x, dy in zip(xs, dys, strict=True)]
        weight_gradients(list(zip(xs, dys, totals, [None] * 3, strict=True)), choice)
        for x, dy, total in zip(xs, dys, totals, strict=True):
            assert torch.equal(total, weight_gradient(x, dy, None, choice))
            held += 1
    return held


def not_a_number_shows() -> int:
    """A pixel that is not a number reaches its neighbours, and nobody else."""
    x = proof.random_image(torch.empty(1, 8, 8, 8, dtype=torch.bfloat16), 8, 4)
    x[0, 3, 4, 4] = float("nan")
    affine, weight = proof.random_affine(x, 8), proof.random_weight(x, 8, 8)
    backend, tiles = choices("forward", x, 8)[0]
    _, y, _ = backend.forward(x, affine, weight, 8, tiles)
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
    chip.of = lambda device: chip.Chip("NVIDIA H200", (9, 0), 132)  # type: ignore[assignment]
    nvrtc.available = lambda: True
    nvrtc.kernel = kernel  # type: ignore[assignment]
    held = sum(proofs(backend, *shape) for backend, shapes in SHAPES.items() for shape in shapes)
    held += proofs(sm90, 16, 32, 16)
    held += several_layers() + not_a_number_shows() + whole_network() + part_of_a_network()
    print(f"{held} comparisons held")


if __name__ == "__main__":
    main()
