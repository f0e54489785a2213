"""The device of a training: what it can do, and in plain words what went wrong on it.

In: a recipe's wishes, or an error. Out: the recipe as this chip can carry it out, or a NestlingError that
says what was found and what to do. It knows neither networks nor folders.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from nestling.errors import NestlingError
from nestling.kernels.nvrtc import kernel_folder
from nestling.recipes.recipe import Recipe
from nestling.runs.device import first_line

TRITON = (7, 0)  # the oldest compute capability Triton, and so torch.compile, writes kernels for
BFLOAT16 = (8, 0)  # the oldest whose convolutions know bfloat16


def able(recipe: Recipe, chip: tuple[int, int] | None = None, triton: bool | None = None) -> tuple[Recipe, list[str]]:
    """The recipe as a chip of this compute capability can carry it out, and what had to be given up."""
    chip = torch.cuda.get_device_capability() if chip is None else chip
    triton = importlib.util.find_spec("triton") is not None if triton is None else triton
    train, given_up = recipe.train, []
    version = ".".join(map(str, chip))
    if train.precision == "bfloat16" and chip < BFLOAT16:
        train = replace(train, precision="float32")
        given_up.append(
            f"this GPU (compute capability {version}) has no bfloat16, which needs 8.0: training in float32"
        )
    if train.compile and train.engine != "eager" and (chip < TRITON or not triton):
        train = replace(train, compile=False)
        found = f"compute capability {version}, 7.0 is needed" if chip < TRITON else "Triton is not installed"
        given_up.append(f"torch.compile cannot be used here ({found}): training without it, slower")
    return replace(recipe, train=train), given_up


def more_queues() -> None:
    """As many hardware queues as CUDA knows, instead of 8: else the streams of trainings side by side wait for one another
    (5 % of six). CUDA reads it once, when it starts: who has used a GPU before training sets CUDA_DEVICE_MAX_CONNECTIONS=32."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def cache_kernels() -> Path | None:
    """Let compiled kernels be kept in the user's cache folder, so that a second start finds them.

    torch keeps its compiled graphs in TORCHINDUCTOR_CACHE_DIR, by default in /tmp, which a restart may clear; Triton its
    own in TRITON_CACHE_DIR. Where the user has set either, that is respected. None: the folder cannot be made.
    """
    folder = kernel_folder()
    if folder is None:
        return None
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    return folder


# --- what went wrong --------------------------------------------------------------------------------------------------


@contextmanager
def memory_explained(recipe: Recipe, kept: Callable[[], str], beside: int = 1) -> Iterator[None]:
    """Turn an error for lack of memory into a NestlingError. `kept` says what is safe, `beside` how many runs there are."""
    try:
        yield
    except NestlingError:
        raise
    except Exception as error:
        if not lacks_memory(error):
            raise
        raise out_of_memory(error, recipe, kept(), beside) from error


def lacks_memory(error: BaseException | None) -> bool:
    """Whether an error, or one behind it, is for lack of memory: what fails inside a capture or a compiled function comes
    out wrapped in the errors of those."""
    while error is not None:
        words = str(error)
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in words:
            return True
        if isinstance(error, RuntimeError) and "out of memory" in words:
            return True
        error = error.__cause__ or error.__context__
    return False


class OutOfMemory(NestlingError):
    """There was no room for a run; with fewer beside it there may be."""


def out_of_memory(error: BaseException, recipe: Recipe, kept: str, beside: int = 1) -> OutOfMemory:
    gpu = recipe.train.device != "cpu" and torch.cuda.is_available()
    where = memory_of(torch.device("cuda" if gpu else "cpu"))
    runs, fewer = (f", {beside} runs side by side", "run fewer side by side, ") if beside > 1 else ("", "")
    return OutOfMemory(
        f"out of memory on {where} with network.name={recipe.network.name}, train.batch={recipe.train.batch}{runs} "
        f"({first_line(error)}). {kept} To go on, {fewer}end other programs on the device, or train anew with a lower "
        f"train.batch, such as {max(1, recipe.train.batch // 2)}."
    )


def memory_of(device: torch.device) -> str:
    """The device and how full it is, as far as it can be asked."""
    if device.type != "cuda":
        return "the CPU"
    try:
        free, total = torch.cuda.mem_get_info(device)
        mine = torch.cuda.memory_reserved(device)
    except RuntimeError:  # so full, or so upset, that it does not answer
        return torch.cuda.get_device_name(device)
    size = 2**30
    return (
        f"{torch.cuda.get_device_name(device)} ({total / size:.1f} GiB, of which this process holds {mine / size:.1f} and "
        f"{free / size:.1f} are free)"
    )
