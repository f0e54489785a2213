"""The manifest of exported stages: one JSON file that says what lies beside it, and how to tell that it is intact.

In: a folder. Out: a Manifest, or a NestlingError that says which file is missing, changed or foreign: every graph's SHA-256
is checked before it is read. Standard library only; who writes the folder is nestling.export.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf, prod
from pathlib import Path
from typing import Any

from nestling.errors import NestlingError
from nestling.export.spec import MOST_VALUES, Spec, from_dict, sides_of
from nestling.files import MANIFEST, from_text, is_text, read_bytes

FORMAT, VERSION = "nestling-stages", 1
FORMS, PRECISIONS = ("onnx", "pt2"), ("float32", "int8")
AGAIN = "export the run again"


@dataclass(frozen=True)
class KnownFile:
    """A file beside the manifest, and how to tell that it is intact."""

    file: str  # in the manifest's folder
    sha256: str


@dataclass(frozen=True)
class StageFile(KnownFile):
    """One stage on disk."""

    takes: tuple[str, ...]  # values from earlier stages; "input" is the image
    gives: tuple[str, ...]  # values for later stages


@dataclass(frozen=True)
class Manifest:
    spec: Spec
    form: str  # onnx | pt2
    precision: str  # float32 | int8
    stages: tuple[StageFile, ...]
    shapes: Mapping[str, tuple[int, ...]]  # of the values between stages, without the batch
    latencies: tuple[float, ...] = ()  # seconds of each stage by itself, on the exporting machine; empty = not measured
    about: Mapping[str, Any] | None = None  # where it comes from and how it was verified, for people
    held_out: KnownFile | None = None  # how sure and how right every stage was of held-out images; None = not known

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "form": self.form,
            "precision": self.precision,
            "network": self.spec.to_dict(),
            "stages": [
                {"stage": number, "size": self.spec.sizes[number - 1], **asdict(stage)}
                for number, stage in enumerate(self.stages, start=1)
            ],
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "latencies": list(self.latencies),
            "about": dict(self.about or {}),
            **({"held_out": asdict(self.held_out)} if self.held_out else {}),
        }


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a folder, its fields checked; the graphs are checked when they are read."""
    path = Path(folder) / MANIFEST
    try:
        found = from_text(read_bytes(path))
    except FileNotFoundError as error:
        raise NestlingError(
            f"{folder} holds no exported stages: there is no {MANIFEST}; run nestling export"
        ) from error
    except (OSError, ValueError) as error:
        raise NestlingError(f"{path} cannot be read ({error}); {AGAIN}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise NestlingError(f"{path} is not a manifest of exported stages; name a folder that nestling export wrote")
    if found.get("version") != VERSION:
        raise NestlingError(f"{path} has version {found.get('version')!r}, expected {VERSION}; {AGAIN}")
    try:
        return parse(found)
    except NestlingError as error:
        raise NestlingError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise NestlingError(f"{path} is damaged ({type(error).__name__}: {error}); {AGAIN}") from error


def parse(found: Mapping[str, Any]) -> Manifest:
    spec, about = from_dict(found["network"]), found.get("about")
    stages = tuple(
        StageFile(name(row["file"]), name(row["sha256"]), names(row["takes"]), names(row["gives"]))
        for row in found["stages"]
    )
    if len(stages) != spec.stages:
        raise NestlingError(f"it lists {len(stages)} graphs for {spec.stages} stages; {AGAIN}")
    for number, (row, size) in enumerate(zip(found["stages"], spec.sizes, strict=True), start=1):
        if (row["stage"], row["size"]) != (number, size):
            raise NestlingError(
                f"its graph {number} is said to be stage {row['stage']!r}, {row['size']!r}; expected {number}, {size!r}; {AGAIN}"
            )
    held_out = KnownFile(*(name(found["held_out"][key]) for key in ("file", "sha256"))) if "held_out" in found else None
    for each in (*stages, held_out) if held_out else stages:
        if Path(each.file).name != each.file or each.file in ("", ".", ".."):
            raise NestlingError(f"the file {each.file!r} is not inside the folder; {AGAIN}")
    shapes = {name(key): sides_of(shape, f"the shape of {key!r}") for key, shape in found["shapes"].items()}
    if sum(map(prod, shapes.values())) > MOST_VALUES:
        raise NestlingError(f"its values take more memory than {4 * MOST_VALUES:,} bytes an image; {AGAIN}")
    missing = {key for stage in stages for key in (*stage.takes, *stage.gives)} - set(shapes)
    if missing:
        raise NestlingError(f"it does not say what shape {sorted(missing)[0]!r} has; {AGAIN}")
    if shapes.get("input") != spec.shape:
        raise NestlingError(f"its input has the shape {shapes.get('input')}, its network takes {spec.shape}; {AGAIN}")
    latencies = tuple(float(value) for value in found.get("latencies", ()))
    if not all(0 <= value < inf for value in latencies) or len(latencies) not in (0, len(stages)):
        raise NestlingError(f"its latencies {latencies} are not seconds of {len(stages)} stages; {AGAIN}")
    form, precision = name(found["form"]), name(found["precision"])
    if form not in FORMS or precision not in PRECISIONS or not isinstance(about, Mapping | None):
        raise NestlingError(
            f"its form is {form!r}, its precision {precision!r}, about is a {type(about).__name__}; expected "
            f"{' or '.join(FORMS)}, {' or '.join(PRECISIONS)}, and a JSON object; {AGAIN}"
        )
    return Manifest(spec, form, precision, stages, shapes, latencies, about, held_out)


def name(found: Any) -> str:
    if not is_text(found):
        raise NestlingError(f"{found!r} is no name; expected text without NUL; {AGAIN}")
    return found


def names(found: Any) -> tuple[str, ...]:
    """Names, each of them once."""
    values = tuple(name(value) for value in found)
    if len(set(values)) != len(values):
        raise NestlingError(f"the names {values} repeat themselves; {AGAIN}")
    return values


def read_known(folder: str | Path, known: KnownFile) -> bytes:
    """The bytes of a graph or another file of an export, which are those that were exported."""
    path = Path(folder) / known.file
    try:
        data = read_bytes(path)
    except OSError as error:
        raise NestlingError(f"cannot read {path}: {error.strerror}; {AGAIN}") from error
    if checksum(data) != known.sha256:
        raise NestlingError(f"{path} is not the file the manifest describes: its checksum differs; {AGAIN}")
    return data


def checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
