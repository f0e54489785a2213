"""Kernels in CUDA C: compiled for one shape at a time by NVRTC, which comes with torch, and launched by the driver.

In: a source file of backends/ and its macros. Out: a kernel that can be called. Machine code is kept in nestling's cache, so a
second start compiles nothing. Nothing here knows what a kernel computes.
"""

import ctypes
import hashlib
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestling.kernels import chip

SOURCES = Path(__file__).parent / "backends"
HEADERS = ("ptx.cuh", "common.cuh")
MAX_LAYERS = 8  # tensors of one kind that a kernel is given at once, as in common.cuh
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_...
Argument = Tensor | int | list[Tensor] | None
Macros = tuple[tuple[str, int], ...]


def kernel_folder() -> Path | None:
    """In the user's cache, by torch's version, so that a second start finds them. None: it cannot be made."""
    try:
        folder = Path.home() / ".cache" / "nestling" / "kernels" / f"torch-{torch.__version__}"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # a user without a home, as in some containers, is a RuntimeError
        return None
    return folder


@cache
def source(file: str) -> str:
    return "".join((SOURCES / name).read_text() for name in (*HEADERS, file))


@cache
def nvrtc() -> ctypes.CDLL | None:
    """The compiler, as torch's own package has it or else as the loader knows it; of the major version torch was made for."""
    name = f"libnvrtc.so.{(torch.version.cuda or '12').partition('.')[0]}"
    packaged = [str(path) for base in sys.path for path in sorted(Path(base).glob(f"nvidia/*/lib/{name}"))]
    for each in (*packaged, name):
        try:
            return ctypes.CDLL(each)
        except OSError:
            continue
    return None


def available() -> bool:
    return torch.version.cuda is not None and nvrtc() is not None


def compiled(file: str, architecture: str, macros: Macros) -> bytes:
    """The machine code of a file for an architecture such as sm_80."""
    library, program, length = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    assert library is not None
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{k}={v}" for k, v in macros)]
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    library.nvrtcCreateProgram(ctypes.byref(program), source(file).encode(), file.encode(), 0, None, None)
    failed = library.nvrtcCompileProgram(program, len(options), words)
    kind = "ProgramLog" if failed else "CUBIN"
    getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(length))
    found = ctypes.create_string_buffer(length.value)
    getattr(library, f"nvrtcGet{kind}")(program, found)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise RuntimeError(
            f"NVRTC does not compile {file} for {architecture} and {dict(macros)}: {found.value.decode()}"
        )
    return found.raw


def cached_at(file: str, architecture: str, macros: Macros) -> Path | None:
    """Where the machine code is kept for all processes of this user."""
    library, folder, major, minor = nvrtc(), kernel_folder(), ctypes.c_int(), ctypes.c_int()
    if library is None or folder is None:
        return None
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    told = f"{architecture} {major.value}.{minor.value} {sorted(macros)} {source(file)}"
    return folder / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.cubin"


def keep(code: bytes, path: Path | None) -> None:
    """A cache that cannot be written costs a third of a second a shape, not the training."""
    if path is None:
        return
    with suppress(OSError), tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(code)
        file.close()
        Path(file.name).replace(path)


class Kernel:
    """A compiled kernel, ready to be launched on the current stream of the current device."""

    def __init__(self, code: bytes, name: str, threads: int, shared: int) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        self.threads, self.shared = threads, shared
        self.check(self.driver.cuModuleLoadData(ctypes.byref(self.module), code))
        self.check(self.driver.cuModuleGetFunction(ctypes.byref(self.function), self.module, name.encode()))
        self.check(self.driver.cuFuncSetAttribute(self.function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared))

    def __call__(self, blocks: int, *args: Argument, layers: int = 1) -> None:
        given = as_c(args)
        pointers = (ctypes.c_void_p * len(given))(*(ctypes.addressof(each) for each in given))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.check(
            self.driver.cuLaunchKernel(
                self.function, blocks, layers, 1, self.threads, 1, 1, self.shared, stream, pointers, None
            )
        )

    def check(self, failed: int) -> None:
        if failed:
            said = ctypes.c_char_p()
            self.driver.cuGetErrorString(failed, ctypes.byref(said))
            raise RuntimeError(f"the CUDA driver says: {(said.value or b'error').decode()} ({failed})")


def as_c(args: tuple[Argument, ...]) -> list[Any]:
    """Tensors and None as pointers; several tensors as a struct of MAX_LAYERS pointers."""
    return [
        (ctypes.c_void_p * MAX_LAYERS)(*(tensor.data_ptr() for tensor in each))
        if isinstance(each, list)
        else ctypes.c_int(each)
        if isinstance(each, int)
        else ctypes.c_void_p(None if each is None else each.data_ptr())
        for each in args
    ]


@cache
def kernel(device: torch.device, file: str, name: str, threads: int, shared: int, macros: Macros) -> Kernel:
    """The kernel `name` of a file, compiled with these macros for this device; `shared` bytes of shared memory a block."""
    architecture = chip.of(device).architecture
    path = cached_at(file, architecture, macros)
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the driver needs torch's context, which the first stream makes
        if path is not None and path.is_file():
            with suppress(RuntimeError, OSError):  # damaged: made anew
                return Kernel(path.read_bytes(), name, threads, shared)
        code = compiled(file, architecture, macros)
        keep(code, path)
        return Kernel(code, name, threads, shared)
