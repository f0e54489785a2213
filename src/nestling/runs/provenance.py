"""Where a run comes from: commit, versions, device, command and time, as one JSON-able dict.

Comes in: the command line and the device. Goes out: what a reader needs to judge or repeat a number.
It writes no file and does not know what the run is.
"""

import contextlib
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from nestling import __version__

PATH = re.compile(
    r"(?<![\w/.~])/[^\s/'\",:;=()\[\]]+(?:/[^\s/'\",:;=()\[\]]+)*"
)  # an absolute one, alone or after "key="


def provenance(command: str, device: str, clock: Callable[[], float]) -> dict[str, Any]:
    commit, dirty = source_commit()
    return {
        "command": without_folders(command),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(clock())),
        "commit": commit,
        "dirty": dirty,
        "versions": {"nestling": __version__, "python": platform.python_version()}
        | {name: installed(name) for name in ("torch", "numpy", "safetensors")},
        "platform": platform.platform(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }


def without_folders(command: str) -> str:
    """A command without the folders of this machine: paths below the working folder are relative, of others their names stay."""
    here = Path.cwd()

    def short(found: re.Match[str]) -> str:
        path = Path(found[0])
        return str(path.relative_to(here)) if path != here and path.is_relative_to(here) else path.name

    return PATH.sub(short, command)


def source_commit() -> tuple[str | None, bool | None]:
    """The commit of nestling's own source and whether it has changed since; None, None outside a checkout.

    A copy that left its .git behind can be told its commit in NESTLING_COMMIT.
    """
    told = os.environ.get("NESTLING_COMMIT")
    if told:
        return told, False
    source = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        # An installed copy may lie inside somebody else's checkout: only a tracked file is at that commit.
        git("ls-files", "--error-unmatch", str(source))
        return git("rev-parse", "HEAD"), git("status", "--porcelain") != ""
    except (OSError, subprocess.SubprocessError):
        return None, None


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device_name(device: str) -> str:
    """The GPU's or the processor's own name, with the number of cores this process may use."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, IndexError):
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        name = models[0].partition(":")[2].strip()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"
