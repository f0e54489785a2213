"""Which device to use: one that was asked for and works, or why it cannot be had.

In: auto, cpu, cuda or cuda:1. Out: a torch.device, or a NestlingError that says what was found and what to do. It does not know
what the device is wanted for.
"""

import torch

from nestling.errors import NestlingError, say_once


def pick_device(wanted: str, setting: str = "train.device=") -> torch.device:
    """The device asked for; "auto" is a GPU that works, or else the CPU. `setting`: how the user asks, for messages."""
    try:
        device = torch.device("cuda" if wanted == "auto" else wanted)
    except RuntimeError as error:
        raise NestlingError(f"{setting}{wanted} is no device; expected auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise NestlingError(f"{setting}{wanted} is not supported; expected auto, cpu or cuda")
    if device.type == "cpu":
        return torch.device("cpu")  # to torch cpu:3 is the same, and others compare names
    trouble = no_gpu(device)
    if not trouble:
        return device
    if wanted != "auto":
        raise NestlingError(f"{setting}{wanted}, but {trouble}; use {setting}auto or cpu.")
    if torch.cuda.is_available():
        say_once(f"using the CPU: {trouble}.")
    return torch.device("cpu")


def no_gpu(device: torch.device) -> str:
    """Why this GPU cannot be used; empty where it can. Found by asking it for a sum."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return f"this torch ({torch.__version__}) was built without CUDA"
        return "torch sees no CUDA device here"
    last = torch.cuda.device_count() - 1
    if device.index is not None and device.index > last:
        return f"the last CUDA device that torch sees is cuda:{last}"
    try:
        assert int(torch.ones(2, device=device).sum()) == 2
    except torch.OutOfMemoryError:
        return ""  # it works, and is full: said where more is known
    except RuntimeError as error:
        name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        return f"{name} (compute capability {major}.{minor}) does not run this torch's kernels: {first_line(error)}"
    return ""


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0].rstrip(".")
