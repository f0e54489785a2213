"""conv.cu on a CPU: compiled by the machine's C++ compiler with emulated.hpp instead of chip.cuh, and run through narrow.py.

`TRITON_INTERPRET=1 python emulated_narrow.py`; says what differed, or how many comparisons held.
"""

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestling.fused import Fused, cuda, launch, narrow, proof
from nestling.fused.forward import Unit
from nestling.nets import NestedNet, build
from nestling.recipe import NetworkRecipe

HERE = Path(__file__).parent
SHAPES = [(8, 8, 32), (16, 16, 32), (32, 32, 16), (8, 16, 16), (16, 32, 8), (32, 16, 8)]  # in, out, side


class Emulated:
    """A kernel as `cuda.Kernel` is one."""

    def __init__(self, name: str, threads: int, shared: int, sizes: tuple[tuple[str, int], ...]) -> None:
        self.threads, self.shared = threads, shared
        text = f'#include "{HERE / "emulated.hpp"}"\n#include "{cuda.HERE / "conv.cu"}"\n'
        text += f"static void entered(void** args) {{ call({name}, args); }}\n"
        text += 'extern "C" void go(int blocks, int threads, int shared, void** args)'
        text += "{ work = entered; launch(blocks, threads, shared, args); }\n"
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
            source.write_text(text)
            macros = [f"-D{k}={v}" for k, v in sizes]
            words = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *macros, str(source), "-o", str(library)]
            subprocess.run(words, check=True)
            self.library = ctypes.CDLL(str(library))

    def __call__(self, blocks: int, *args: Any) -> None:
        given = cuda.as_c(args)
        places = (ctypes.c_void_p * len(given))(*(ctypes.addressof(each) for each in given))
        self.library.go(blocks, self.threads, self.shared, places)


@cache
def kernel(_: torch.device, name: str, threads: int, shared: int, sizes: tuple[tuple[str, int], ...]) -> Emulated:
    return Emulated(name, threads, shared, sizes)


def proofs(cin: int, cout: int, side: int) -> int:
    """What the kernels must show before they are used on a GPU."""
    like = torch.empty(2, cin, side, side, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    assert narrow.suits(like, cout)
    blocks = narrow.conv_blocks(side, cout)
    for adds, moments in ((True, True), (False, False)):
        assert proof.conv_agrees(like, cout, blocks, True, adds, moments), (cin, cout, side, adds)
    assert proof.back_agrees(like, cout, blocks), (cin, cout, side)
    assert proof.weight_agrees(like, cout, narrow.weight_blocks(3, side, cout)), (cin, cout, side)
    return 4


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


def main() -> None:
    cuda.available = lambda device: True  # type: ignore[assignment]
    cuda.kernel = kernel  # type: ignore[assignment]
    held = sum(proofs(*shape) for shape in SHAPES) + not_a_number_shows() + whole_network()
    print(f"{held} comparisons held")


if __name__ == "__main__":
    main()
