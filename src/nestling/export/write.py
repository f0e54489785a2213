"""Writing exported stages: graphs and manifest into a folder that appears whole, verified, or not at all.

In: a network, what is known of it, and real images. Out: a folder and what was verified: every stage's logits, read back
from disk, against the network's own, one image at a time and 32 together. Knows neither runs nor the command line.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestling import __version__
from nestling.errors import NestlingError
from nestling.export.fold import fold, merge, split
from nestling.export.freeze import Frozen, freeze, shapes
from nestling.files import saying, to_text, write_atomically
from nestling.nets import NestedNet
from nestling.runtime.engine import Engine, Floats, Stop, warm_up
from nestling.runtime.manifest import MANIFEST, Manifest, StageFile, checksum, read_manifest
from nestling.runtime.spec import Spec

TOLERANCE = 1e-4  # of logits, relative to the largest where that is above 10
BATCHES = (1, 32)
Form = Callable[[Frozen, dict[str, tuple[int, ...]]], bytes]


def onnx_form() -> tuple[Form, Callable[[Path, Manifest], Engine]]:
    from nestling.export.graph import write_stage
    from nestling.runtime.portable import open_engine

    return write_stage, open_engine


def pt2_form() -> tuple[Form, Callable[[Path, Manifest], Engine]]:
    from nestling.export.pt2 import open_engine, write_stage

    return write_stage, open_engine


FORMS = {"onnx": onnx_form, "pt2": pt2_form}


def export_net(
    net: NestedNet,
    spec: Spec,
    folder: str | Path,
    images: Tensor,
    form: str = "onnx",
    about: dict[str, Any] | None = None,
) -> Manifest:
    """Write a network's stages into a folder, verified on `images` (n,C,H,W, normalised). Replaces an earlier export."""
    if form not in FORMS:
        raise NestlingError(f"unknown format {form!r}; expected {' or '.join(FORMS)}")
    try:
        write, reopen = FORMS[form]()
    except ImportError as error:
        raise NestlingError(f"exporting needs more packages ({error}); run: pip install 'nestling[export]'") from error
    stages = merge(fold(freeze(net)))
    stages = split(stages) if form == "onnx" else stages
    known = shapes(net, stages)
    with whole_folder(Path(folder)) as place:
        files: list[StageFile] = []
        for stage in stages:
            name, data = f"stage{len(files) + 1}.{form}", write(stage, known)
            write_atomically(place / name, data)
            files.append(StageFile(name, checksum(data), stage.takes, stage.gives))
        passed = {name: known[name] for file in files for name in ("input", *file.takes, *file.gives)}
        manifest = Manifest(
            spec, form, "float32", tuple(files), passed, (), {**(about or {}), "versions": versions(form)}
        )
        engine = reopen(place, save(place, manifest))
        try:
            verified = verify(engine, net, images)
            latencies = tuple(warm_up(engine, spec.shape))
        finally:
            engine.close()
        manifest = replace(manifest, latencies=latencies, about={**(manifest.about or {}), "verified": verified})
        save(place, manifest)
    return manifest


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
    place, old = folder.with_name(f".{folder.name}.tmp"), folder.with_name(f".{folder.name}.old")
    if folder.exists() and not folder.is_dir():
        raise NestlingError(f"{folder} is a file, expected a folder to write an export into; choose another name")
    if folder.exists() and not (folder / MANIFEST).is_file() and any(folder.iterdir()):
        raise NestlingError(f"{folder} holds other things than an export; choose another folder")
    shutil.rmtree(place, ignore_errors=True)
    with saying(folder, 0, "nothing was written"):
        place.mkdir(parents=True)
    try:
        yield place
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            os.rename(folder, old)
        os.rename(place, folder)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def verify(engine: Engine, net: NestedNet, images: Tensor, batches: Sequence[int] = BATCHES) -> dict[str, Any]:
    """Compare every stage with the network itself on real images; raises if any logit is further off than TOLERANCE."""
    training = net.training
    net.eval()
    with torch.no_grad():
        device = next(net.parameters()).device
        expected = [logits.float().cpu().numpy() for logits in net(images.to(device))]
    net.train(training)
    off = [0.0] * engine.stages
    for batch in batches:
        found = run_all(engine, images.cpu().numpy(), batch)
        for stage, logits in enumerate(found):
            scale = max(1.0, float(np.abs(expected[stage]).max()) / 10)
            off[stage] = max(off[stage], float(np.abs(logits - expected[stage]).max()) / scale)
    bad = [stage for stage, amount in enumerate(off, start=1) if not amount <= TOLERANCE]  # also if it is NaN
    if bad:
        raise NestlingError(
            f"the exported stage {bad[0]} differs from the network by {off[bad[0] - 1]:.1e} on {len(images)} images, "
            f"more than {TOLERANCE:g}; nothing was written. This is a bug: please report the network's recipe"
        )
    return {"images": len(images), "batches": list(batches), "largest_difference": off, "tolerance": TOLERANCE}


def run_all(engine: Engine, images: Floats, batch: int) -> list[Floats]:
    """The logits of every stage (n,classes) by an engine, so many images at a time."""
    found: list[list[Floats]] = [[] for _ in range(engine.stages)]
    for start in range(0, len(images), batch):
        state = engine.start(np.ascontiguousarray(images[start : start + batch]))
        for stage in range(1, engine.stages + 1):
            logits, state = engine.step(stage, state, Stop())
            found[stage - 1].append(logits)
    return [np.concatenate(each) for each in found]
