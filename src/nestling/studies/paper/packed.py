"""Run folders as a few small files, to be carried from a machine that will be given back to the next one.

In: a folder of runs, how many files of which size may travel. Out: `runs.tar.1`, `runs.tar.2`, ..., and from them the run folders
again. Of finished runs everything but tensors travels, of those that were begun the checkpoint, too, the ones nearest to
their end first. What finds no room is named. A folder that has got further is left as it is.
"""

import io
import re
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nestling.errors import NestlingError
from nestling.files import CHECKPOINT, LOG, PROVENANCE, RECIPE, RESULTS, write_atomically
from nestling.runs.folder import RunDir
from nestling.studies.paper.grid import all_epochs

MIB = 2**20
WORDS = (RECIPE, PROVENANCE, LOG, RESULTS)
LATER = (CHECKPOINT, RESULTS)  # written last: what was cut short then looks like a run that has not got so far
PART = "runs.tar.{}"


@dataclass(frozen=True)
class Packed:
    runs: tuple[str, ...]
    left_out: tuple[str, ...]
    files: tuple[str, ...]


def pack(runs: Path, to: Path, files: int, mib: int) -> Packed:
    """Write as many runs as find room in so many files of so many MiB."""
    room, written, kept, left = files * mib * MIB, io.BytesIO(), [], []
    with tarfile.open(fileobj=written, mode="w", bufsize=tarfile.BLOCKSIZE, format=tarfile.PAX_FORMAT) as tar:
        for run in by_progress(runs):
            names = [name for name in (*WORDS, *([] if run.has(RESULTS) else [CHECKPOINT])) if run.has(name)]
            made = {name: zlib.compress((run.path / name).read_bytes(), 6) for name in names}
            size = sum(tarfile.BLOCKSIZE * (2 + len(data) // tarfile.BLOCKSIZE) for data in made.values())
            if written.tell() + size + tarfile.RECORDSIZE > room:
                left.append(run.path.name)
                continue
            kept.append(run.path.name)
            for name, data in made.items():
                entry = tarfile.TarInfo(f"{run.path.name}/{name}.z")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    to.mkdir(parents=True, exist_ok=True)
    for old in to.glob(PART.format("*")):
        old.unlink()
    data, parts = written.getvalue(), []
    for number, start in enumerate(range(0, len(data) if kept else 0, mib * MIB), start=1):
        write_atomically(to / PART.format(number), data[start : start + mib * MIB])
        parts.append(str(to / PART.format(number)))
    return Packed(tuple(kept), tuple(left), tuple(parts))


def by_progress(runs: Path) -> list[RunDir]:
    """Runs with something to carry: first those that are finished, then those that are nearest to it."""
    found = [RunDir(path.parent) for path in sorted(runs.glob(f"*/{RECIPE}"))]
    begun = [run for run in found if run.has(RESULTS) or run.has(CHECKPOINT)]
    return sorted(begun, key=lambda run: (not run.has(RESULTS), -progress(run)))


def progress(run: RunDir) -> float:
    """The share of a run's epochs that is done."""
    return epochs(run) / max(1, all_epochs(run.read_recipe()))


def epochs(run: RunDir) -> int:
    return max((line["epoch"] for line in run.read_log()), default=0)


def unpack(packed: Path, runs: Path) -> list[str]:
    """Bring packed runs back; the names of those that were brought."""
    count = len(list(packed.glob(PART.format("*"))))
    parts = [packed / PART.format(number) for number in range(1, count + 1)]
    if not parts or not all(part.is_file() for part in parts):
        raise NestlingError(
            f"{packed} holds no packed runs ({PART.format(1)}, ..., each of them); see nestling paper pack"
        )
    brought: dict[str, dict[str, bytes]] = {}
    for name, file, data in members(b"".join(part.read_bytes() for part in parts), packed):
        brought.setdefault(name, {})[file] = data
    return [name for name, found in brought.items() if put(runs / name, found)]


def members(data: bytes, packed: Path) -> Iterator[tuple[str, str, bytes]]:
    """Run, file and contents of everything in it; names that `pack` would not write are refused."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for entry in tar:
                name = re.fullmatch(r"([A-Za-z0-9_.,+-]+)/([a-z.]+)\.z", entry.name)
                content = tar.extractfile(entry) if entry.isfile() else None
                if not name or set(name[1]) == {"."} or name[2] not in (*WORDS, CHECKPOINT) or content is None:
                    raise NestlingError(f"{packed} holds {entry.name!r}, which nestling paper pack does not write")
                yield name[1], name[2], zlib.decompress(content.read())
            if (rest := data[tar.offset :]).strip(b"\0") or len(
                rest
            ) < 2 * tarfile.BLOCKSIZE:  # tarfile ends without a word
                raise tarfile.ReadError(f"it breaks off after {tar.offset:,} of {len(data):,} bytes")
    except (tarfile.TarError, zlib.error) as error:
        raise NestlingError(f"{packed} is damaged or lacks a part ({error}); bring its files here again") from error


def put(path: Path, found: dict[str, bytes]) -> bool:
    """Write one run, unless the one that is there has got as far."""
    here = RunDir(path)
    lines = found.get(LOG, b"").count(b"\n")
    if here.has(RESULTS) or (RESULTS not in found and here.has(CHECKPOINT) and epochs(here) >= lines):
        return False
    path.mkdir(parents=True, exist_ok=True)
    for name in sorted(found, key=lambda name: name in LATER):
        write_atomically(path / name, found[name])
    return True
