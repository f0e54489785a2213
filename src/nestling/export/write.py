"""Writing exported stages: graphs and manifest into a folder that appears whole, or not at all.

In: a network, what is known of it, and a function that opens what was written and judges it. Out: a folder and its manifest.
Runs nothing, and knows neither runs nor the command line.
"""

import contextlib
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nestling import __version__
from nestling.errors import NestlingError
from nestling.export.fold import fold, merge, split
from nestling.export.freeze import Frozen, freeze, shapes
from nestling.export.manifest import FORMAT, Manifest, StageFile, checksum, read_manifest
from nestling.export.spec import Spec
from nestling.files import MANIFEST, from_text, read_bytes, saying, to_text, write_atomically
from nestling.nets import NestedNet

LEFT_BEHIND = 24 * 3600.0  # seconds
StageWriter = Callable[[Frozen, dict[str, tuple[int, ...]]], bytes]


def onnx_form() -> StageWriter:
    from nestling.export.graph import write_stage

    return write_stage


def pt2_form() -> StageWriter:
    from nestling.export.torch_export import write_stage

    return write_stage


FORMS = {"onnx": onnx_form, "pt2": pt2_form}


def write_stages(
    net: NestedNet,
    spec: Spec,
    folder: Path,
    form: str,
    about: Mapping[str, Any],
    complete: Callable[[Path, Manifest], Manifest],
) -> Manifest:
    """Write a network's stages into a folder, in place of an earlier export. `complete` opens what was written, before the
    folder appears: it returns the manifest with what it found out, or raises, and then nothing was written."""
    if form not in FORMS:
        raise NestlingError(f"unknown format {form!r}; expected {' or '.join(FORMS)}")
    try:
        write = FORMS[form]()
    except ImportError as error:
        raise NestlingError(f"exporting needs more packages ({error}); run: pip install 'nestling[export]'") from error
    stages = merge(fold(freeze(net)))
    stages = split(stages) if form == "onnx" else stages
    known = shapes(net, stages)
    graphs = [(write(stage, known), stage.takes, stage.gives) for stage in stages]
    made = Manifest(spec, form, "float32", (), known, (), {**about, "versions": versions(form)})
    return write_graphs(graphs, made, folder, complete)


def write_graphs(
    graphs: Iterable[tuple[bytes, tuple[str, ...], tuple[str, ...]]],
    manifest: Manifest,
    folder: Path,
    complete: Callable[[Path, Manifest], Manifest],
) -> Manifest:
    """The graphs of all stages (model, takes, gives) into a folder that appears whole, or not at all."""
    with whole_folder(folder) as place:
        files: list[StageFile] = []
        for data, takes, gives in graphs:
            name = f"stage{len(files) + 1}.{manifest.form}"
            write_atomically(place / name, data)
            files.append(StageFile(name, checksum(data), takes, gives))
        passed = {name: manifest.shapes[name] for file in files for name in ("input", *file.takes, *file.gives)}
        manifest = complete(place, save(place, replace(manifest, stages=tuple(files), shapes=passed)))
        return save(place, manifest)


def save(place: Path, manifest: Manifest) -> Manifest:
    """Write the manifest and read it back."""
    write_atomically(place / MANIFEST, (to_text(manifest.to_dict()) + "\n").encode())
    return read_manifest(place)


def versions(form: str) -> dict[str, str]:
    names = ("torch", "onnx", "onnxruntime") if form == "onnx" else ("torch",)
    return {"nestling": __version__, **{name: version(name) for name in names}}


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder that is filled beside its place and moved there at the end; on an error nothing is left of it."""
    if folder.name in ("", ".."):  # it is filled beside its place, under its own name
        raise NestlingError(
            f"cannot write an export over {folder}; give it a name of its own, such as {folder / 'export'}"
        )
    if folder.exists() and not folder.is_dir():
        raise NestlingError(f"{folder} is a file, expected a folder to write an export into; choose another name")
    if folder.exists() and not is_export(folder):
        raise NestlingError(f"{folder} holds other things than an export; choose another folder")
    with saying(folder, 0, "nothing was written"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        sweep_up(folder)
        # Of its own: another process may be writing an export to the same place. The last one stays.
        around = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    place, old = around / folder.name, around / "old"
    try:
        with saying(folder, 0, "nothing was written"):
            place.mkdir()
        yield place
        with saying(folder, 0, "another process may have written it meanwhile; try again"):
            if folder.exists():
                os.rename(folder, old)
            os.rename(place, folder)
    finally:
        shutil.rmtree(around, ignore_errors=True)


def is_export(folder: Path) -> bool:
    """Whether a folder is empty, or holds an export and nothing else: it is removed when another takes its place."""
    inside = {each.name for each in folder.iterdir() if not each.name.startswith(".")}
    if not inside:
        return True
    try:
        found = from_text(read_bytes(folder / MANIFEST))
        rows = [*found["stages"], *([found["held_out"]] if "held_out" in found else [])]
        return found["format"] == FORMAT and inside <= {MANIFEST, *(row["file"] for row in rows)}
    except (OSError, ValueError, KeyError, TypeError):
        return False


def sweep_up(folder: Path) -> None:
    """Remove what killed exports to this place left behind a day ago and earlier."""
    for each in folder.parent.glob(f".{glob.escape(folder.name)}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - each.stat().st_mtime > LEFT_BEHIND:
                shutil.rmtree(each)
