"""Writing files whole, reading what is really a file, JSON that every reader accepts, and the names of our files.

Comes in: bytes for a path, or a value. Goes out: a file that is complete or untouched, whatever happens
meanwhile; JSON text. A full disk becomes a NestlingError that names the file. What is read may come from
anywhere: pipes, devices and JSON without end are refused. It does not know what stands in the files.
"""

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nestling.errors import NestlingError

# A run's folder: also what every stage said of the test set (outputs), some of its images (gallery), latencies (profile), and
# errors under deadlines on a busy machine (curve)
RECIPE, PROVENANCE, LOG, RESULTS = "recipe.json", "provenance.json", "log.jsonl", "results.json"
WEIGHTS, CHECKPOINT = "weights.safetensors", "checkpoint.safetensors"
NETWORK = "network.json"  # of a network of the user's own
OUTPUTS, GALLERY = "outputs.safetensors", "gallery.safetensors"
PROFILE, CURVE = "profile.json", "curve.json"
# A folder of exported stages
MANIFEST = "manifest.json"


class DiskFull(NestlingError):
    """There is no room for a file: who knows how the work goes on afterwards says so."""


def write_atomically(path: Path, data: bytes) -> None:
    """Put data at path so that, whatever happens, path holds either all of it or what it held before."""
    # A fixed name: what a kill leaves behind is overwritten next time.
    temporary = path.with_name(f".{path.name}.tmp")
    with saying(path, len(data), "what was there before is unchanged"):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    # The new name, too, should outlive a power cut; not every file system lets a folder be synced.
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def saying(path: Path, size: int, consequence: str) -> Iterator[None]:
    """Turn an OSError while writing into a NestlingError that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            need = f"{path} needs {size:,} bytes" if size else f"there is no room for {path}"
            raise DiskFull(f"the disk is full: {need}; free some space and try again ({consequence})") from error
        problem = f"cannot write {path}: {error.strerror}; check the folder and its permissions"
        raise NestlingError(f"{problem} ({consequence})") from error


def read_bytes(path: Path) -> bytes:
    """A file's contents, or an OSError. Only of a file: a pipe may never end, and a folder has none."""
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "no file has a NUL in its name", str(path))
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is a folder, pipe or device, expected a file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def is_text(found: object) -> bool:
    """Text that files, terminals and clients can be given: no NUL, no half of a character."""
    if not isinstance(found, str) or "\0" in found:
        return False
    try:
        found.encode()
    except UnicodeEncodeError:
        return False
    return True


def from_text(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError where it is none, is nested too deeply, or has numbers that are none."""
    try:
        return json.loads(text, parse_float=finite, parse_constant=finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a number that can be held")
    return value


def to_text(value: Any, indent: int | None = 2) -> str:
    """value as standard JSON: NaN and infinities become null (JSON has no word for them), paths text."""
    return json.dumps(plain(value), indent=indent, allow_nan=False)


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
