"""Every kernel compiled for GPUs that are not here: neither Triton's compiler nor NVIDIA's needs one.

What a pass would launch is written down instead of launched, on a CPU, and each of it then compiled to a GPU's machine code.
Whether it computes what it should is checked elsewhere: by the interpreter (interpreted_*.py) and, where there is one, on a GPU.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_gradients import batch, losses_of, make

from nestling.gradients import Accumulator, kernels
from nestling.gradients.combiners import OSGD
from nestling.kernels import Fused, cuda, cuts, hopper, narrow, proof
from nestling.nets import build
from nestling.nets.within import within
from nestling.recipes.recipe import NetworkRecipe

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from nestling.gradients import jitted as gradients  # noqa: E402
from nestling.kernels import jitted as fused  # noqa: E402

TYPES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.int64: "*i64", torch.int32: "*i32"
}  # fmt: skip
CHIPS = {80: 163, 90: 227}  # compute capability -> KiB of shared memory that a program may have: A100, H100 and H200


@dataclass(frozen=True)
class Launch:
    kernel: Any
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int

    def compiled(self, chip: int) -> Any:
        # torch's memory begins at multiples of 16 bytes, which is what lets loads be wide and go behind the program's back
        aligned = {(i,): [["tt.divisibility", 16]] for i, (_, kind) in enumerate(self.types) if kind.startswith("*")}
        source = ASTSource(self.kernel, dict(self.types), dict(self.constants), aligned)
        return triton.compile(source, target=GPUTarget("cuda", chip, 32), options={"num_warps": self.warps})


def launches(work: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> set[Launch]:
    """What `work` would launch. Nothing is computed, so its results mean nothing."""
    found: set[Launch] = set()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        constant = {p.name for p in kernel.params if p.is_constexpr}
        types = tuple((name, "constexpr" if name in constant else kind_of(given[name])) for name in kernel.arg_names)
        found.add(
            Launch(kernel, types, tuple((name, given[name]) for name in sorted(constant)), options.get("num_warps", 4))
        )

    monkeypatch.setattr(JITFunction, "run", run)
    work()
    monkeypatch.undo()
    return found


def kind_of(value: Any) -> str:
    return TYPES[value.dtype] if isinstance(value, torch.Tensor) else "fp32" if isinstance(value, float) else "i32"


def passes(name: str) -> Callable[[], None]:
    """A forward and a backward pass by every stage's subnetwork, and by the whole: one block of layers of each size."""

    def work() -> None:
        net = build(NetworkRecipe(name=name, blocks=(8, 8, 8) if name.startswith("depth") else (1, 1, 1)))
        net = net.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        x = torch.zeros(128, 3, 32, 32).contiguous(memory_format=torch.channels_last)
        for each in (net, *(within(net, stage) for stage in range(1, len(net.plan.heads)))):
            with torch.autocast("cpu", torch.bfloat16):
                logits = Fused(each)(x)
            sum(each.float().sum() for each in logits).backward()  # type: ignore[union-attr]

    return work


def combining(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def work() -> None:
        monkeypatch.setattr(kernels, "usable", lambda tensor, tasks: True)
        for name, scope in (("nested", "all"), ("sliced", "block"), ("tree", "tensor")):
            net = make(name)
            Accumulator(net, OSGD(scope=scope), check=False).backward(losses_of(net, *batch()))
        rows = torch.zeros(3, kernels.SPAN)
        kernels.gram_of_matrix(rows)
        kernels.update_of_matrix(rows, torch.zeros(3), torch.zeros(kernels.SPAN))

    return work


@pytest.mark.slow
def test_every_kernel_compiles_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    works = passes("width-resnet42"), passes("depth-sparse98"), combining(monkeypatch)
    found = set.union(*(launches(work, monkeypatch) for work in works))
    every = {kernel for room in (fused, gradients) for kernel in vars(room).values() if isinstance(kernel, JITFunction)}
    entered = {kernel for kernel in every if not kernel.fn.__name__.startswith("_")}  # the others are parts of these
    assert {each.kernel for each in found} == entered and len(found) > 100
    for each in found:
        for chip, room in CHIPS.items():
            made = each.compiled(chip)
            assert made.asm["cubin"] and made.metadata.shared <= room * 1024, (each, made.metadata.shared)


class Loaded:
    """A kernel whose code is right if it is b"good"."""

    def __init__(self, code: bytes, name: str, threads: int, shared: int) -> None:
        if code != b"good":
            raise RuntimeError("the CUDA driver says: device kernel image is invalid")


def test_machine_code_is_kept_and_made_anew_where_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, int]] = []
    folders = [tmp_path]

    def compiled(file: str, architecture: str, **sizes: int) -> bytes:
        made.append(sizes)
        return b"good"

    stream = SimpleNamespace(synchronize=lambda: None)
    for name, fake in (
        ("compiled", compiled),
        ("kernel_folder", lambda: folders[0]),
        ("nvrtc", lambda: SimpleNamespace(nvrtcVersion=lambda major, minor: None)),
        ("Kernel", Loaded),
    ):
        monkeypatch.setattr(cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def start() -> int:
        cuda.kernel.cache_clear()  # as a new process
        cuda.kernel(torch.device("cuda"), "conv.cu", "conv", 128, 1024, (("CIN", 8),))
        return len(made)

    assert [start(), start()] == [1, 1], "found again"
    (path,) = tmp_path.iterdir()
    for damaged in (b"", b"cut off"):
        path.write_bytes(damaged)
        before = len(made)
        assert start() == before + 1 and path.read_bytes() == b"good" and start() == before + 1
    folders[0] = tmp_path / "gone"  # cannot be written
    assert [start(), start()] == [4, 5]
    cuda.kernel.cache_clear()


def test_a_kernel_in_cuda_c_that_cannot_be_had_leaves_it_to_triton() -> None:
    def fails(choice: Any) -> bool:
        raise RuntimeError("invalid value for --gpu-architecture")

    assert not proof.runs_and(fails, narrow.conv_blocks(32, 8))
    with pytest.raises(RuntimeError, match="architecture"):
        proof.runs_and(fails, cuts.conv_tiles(2**17, 8, 8))


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "room"), [("sm_80", 163), ("sm_90a", 227)])
def test_kernels_in_cuda_c_compile_for_shapes_of_every_kind(
    chip: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cuda.nvrtc() is None:
        pytest.skip("NVRTC is not installed")
    found: dict[Any, int] = {}

    def kernel(
        device: torch.device, file: str, name: str, threads: int, shared: int, sizes: Any
    ) -> Callable[..., None]:
        found[file, sizes] = shared
        return lambda *args, layers=1: None

    def image(channels: int, side: int) -> torch.Tensor:
        return torch.empty(4, channels, side, side).contiguous(memory_format=torch.channels_last)

    monkeypatch.setattr(cuda, "kernel", kernel)
    shapes = [(8, 8, 32), (16, 16, 32), (32, 32, 32), (8, 16, 16), (16, 32, 8), (32, 8, 8)]
    wide = [
        (32, 32, 32),
        (64, 64, 16),
        (128, 128, 8),
        (32, 64, 32),
        (64, 128, 16),
        (64, 64, 8),
        (32, 32, 16),
        (32, 64, 16),
    ]
    blocks = [narrow.conv_blocks(side, cout) for _, cout, side in shapes]
    choices: list[Any] = list(
        zip(shapes, blocks, blocks, (narrow.weight_blocks(4, s[2], s[1]) for s in shapes), strict=True)
    )
    if chip == "sm_90a":
        ways = [[hopper.conv_patches(side, cin, cout, back) for cin, cout, side in wide] for back in (False, True)]
        choices += zip(wide, *ways, (hopper.weight_patches(4, s[2], *s[:2]) for s in wide), strict=True)
    for (cin, cout, side), there, back, splits in choices:
        x, y, numbers = image(cin, side), image(cout, side), torch.empty(1)
        there.conv(x, numbers, y, numbers, numbers, h=x)
        back.conv(x, numbers, y, numbers, numbers, z=y)
        splits.weight_gradients([x], [y], [numbers])
    assert len(found) == 3 * len(choices) and max(found.values()) < room * 1024
    for file, sizes in found:
        assert cuda.compiled(file, chip, **dict(sizes))[:4] == b"\x7fELF"
