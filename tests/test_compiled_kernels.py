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
from nestling.kernels import Fused, chip, nvrtc, proof
from nestling.kernels.backends import BACKENDS, Choice, sm80, sm90
from nestling.kernels.backends import triton as in_triton
from nestling.nets import build
from nestling.nets.within import within
from nestling.recipes.recipe import NetworkRecipe

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from nestling.gradients import gram_kernels  # noqa: E402
from nestling.gradients.combiners import osgd_triton  # noqa: E402
from nestling.kernels import elementwise_kernels  # noqa: E402
from nestling.kernels.backends import triton_kernels  # noqa: E402

TYPES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.int64: "*i64", torch.int32: "*i32"
}  # fmt: skip
H200 = chip.Chip("NVIDIA H200", (9, 0), 132)
A100 = chip.Chip("NVIDIA A100-SXM4-80GB", (8, 0), 108)
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
    rooms = (elementwise_kernels, triton_kernels, gram_kernels, osgd_triton)
    every = {kernel for room in rooms for kernel in vars(room).values() if isinstance(kernel, JITFunction)}
    parts = {elementwise_kernels.partial_moments, elementwise_kernels.through_norm}  # of other kernels
    entered = {kernel for kernel in every - parts if not kernel.fn.__name__.startswith("_")}
    assert {each.kernel for each in found} == entered and len(found) > 100
    for each in found:
        for capability, room in CHIPS.items():
            made = each.compiled(capability)
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

    def compiled(file: str, architecture: str, macros: nvrtc.Macros) -> bytes:
        made.append(dict(macros))
        return b"good"

    stream = SimpleNamespace(synchronize=lambda: None)
    for name, fake in (
        ("compiled", compiled),
        ("kernel_folder", lambda: folders[0]),
        ("nvrtc", lambda: SimpleNamespace(nvrtcVersion=lambda major, minor: None)),
        ("Kernel", Loaded),
    ):
        monkeypatch.setattr(nvrtc, name, fake)
    monkeypatch.setattr(chip, "of", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def start() -> int:
        nvrtc.kernel.cache_clear()  # as a new process
        nvrtc.kernel(torch.device("cuda"), "sm80.cu", "conv", 128, 1024, (("CIN", 8),))
        return len(made)

    assert [start(), start()] == [1, 1], "found again"
    (path,) = tmp_path.iterdir()
    for damaged in (b"", b"cut off"):
        path.write_bytes(damaged)
        before = len(made)
        assert start() == before + 1 and path.read_bytes() == b"good" and start() == before + 1
    folders[0] = tmp_path / "gone"  # cannot be written
    assert [start(), start()] == [4, 5]
    nvrtc.kernel.cache_clear()


def test_a_kernel_in_cuda_c_that_cannot_be_had_leaves_it_to_triton() -> None:
    def fails(choice: Any) -> bool:
        raise RuntimeError("invalid value for --gpu-architecture")

    for backend in BACKENDS[:-1]:
        assert not proof.runs_and(fails, Choice(backend, None))
    with pytest.raises(RuntimeError, match="architecture"):
        proof.runs_and(fails, Choice(in_triton, in_triton.conv_tiles(2**17, 8, 8)))


@pytest.mark.slow
@pytest.mark.parametrize(("on", "room"), [(A100, 163), (H200, 227)], ids=["A100", "H200"])
def test_kernels_in_cuda_c_compile_for_shapes_of_every_kind(
    on: chip.Chip, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if nvrtc.nvrtc() is None:
        pytest.skip("NVRTC is not installed")
    found: dict[Any, int] = {}

    def kernel(
        device: torch.device, file: str, name: str, threads: int, shared: int, macros: nvrtc.Macros
    ) -> Callable[..., None]:
        found[file, macros] = shared
        return lambda *args, layers=1: None

    def image(channels: int, side: int) -> torch.Tensor:
        x = torch.empty(4, channels, side, side, dtype=torch.bfloat16)
        return x.contiguous(memory_format=torch.channels_last)

    monkeypatch.setattr(nvrtc, "kernel", kernel)
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    monkeypatch.setattr(chip, "of", lambda device: on)
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
    runs: list[tuple[Any, Any]] = [(sm80, shape) for shape in shapes]
    runs += [(sm90, shape) for shape in wide if on.has_wgmma]
    for backend, (cin, cout, side) in runs:
        x, y, numbers = image(cin, side), image(cout, side), torch.empty(4, max(cin, cout))
        assert all(backend.suits(way, x, cout) for way in ("forward", "back", "weights"))
        there, back, splits = (backend.tiles(way, x, cout)[0] for way in ("forward", "back", "weights"))
        backend.forward(x, numbers, numbers, cout, there, moments=True)
        backend.back(x, numbers, y, numbers, back)
        backend.weights([x], [y], splits)
    assert len(found) == 3 * len(runs) and max(found.values()) < room * 1024
    for file, macros in found:
        assert nvrtc.compiled(file, on.architecture, macros)[:4] == b"\x7fELF"
