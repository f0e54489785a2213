"""Exporting a network and trusting what was written: every stage, read back from disk, is run before it counts.

In: a network, what is known of it, real images or a data set. Out: a folder of stages whose logits are the network's own, one
image at a time and 32 together, or whose error in 8 bits is stated, and how long each stage takes here. Writing is
nestling.export's business, running that of the engines.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestling.data import DataSet
from nestling.errors import NestlingError
from nestling.export.fold import fold, merge
from nestling.export.freeze import freeze, shapes
from nestling.export.manifest import KnownFile, Manifest, checksum
from nestling.export.spec import Spec
from nestling.export.write import versions, write_graphs, write_stages
from nestling.files import write_atomically
from nestling.nets import NestedNet
from nestling.runs.provenance import device_name
from nestling.runtime.confidence import Outcomes
from nestling.runtime.engine import Engine, Floats, Stop, warm_up

TOLERANCE = 1e-4  # of logits, relative to the largest where that is above 10
MOST = 1e-2  # the same, for a network whose own answers are further off for rounding
BATCHES = (1, 32)
HELD_OUT = "held-out.bin"
VERIFIED = 64  # images on which the graphs that become 8 bits are verified


def open_onnx(folder: Path, manifest: Manifest) -> Engine:
    from nestling.runtime.portable import open_engine

    return open_engine(folder, manifest)


def open_pt2(folder: Path, manifest: Manifest) -> Engine:
    from nestling.runtime.engines.pt2 import open_engine

    return open_engine(folder, manifest)


OPENERS: dict[str, Callable[[Path, Manifest], Engine]] = {"onnx": open_onnx, "pt2": open_pt2}


def export_net(
    net: NestedNet,
    spec: Spec,
    folder: str | Path,
    images: Tensor,
    form: str = "onnx",
    about: Mapping[str, Any] | None = None,
    held_out: Outcomes | None = None,
) -> Manifest:
    """Write a network's stages into a folder, verified on `images` (n,C,H,W, normalised). Replaces an earlier export.
    `held_out`: how sure and right its stages were of images it was not trained on, so that it can stop when it is sure."""

    def complete(place: Path, manifest: Manifest) -> Manifest:
        engine = OPENERS[form](place, manifest)
        try:
            story = {**(manifest.about or {}), "verified": verify(engine, net, images), "measured": here_and_now()}
            known = keep(place, held_out) if held_out else None
            return replace(manifest, latencies=tuple(warm_up(engine, spec.shape)), about=story, held_out=known)
        finally:
            engine.close()

    return write_stages(net, spec, Path(folder), form, about or {}, complete)


def export_int8(
    net: NestedNet, spec: Spec, folder: Path, data: DataSet, images: int, about: Mapping[str, Any]
) -> Manifest:
    """Write a network's stages in 8 bits, with the error of every stage before and after on the same test images. The float32
    graphs they are made from are verified first."""
    from nestling.export.graph import write_stage
    from nestling.export.quantise import calibration_and_test, convolves, outputs, quantise_stage
    from nestling.runtime.engines.onnx import OnnxEngine, StageGraph

    if spec.output:
        raise NestlingError(f"{spec.name} answers with no classes; 8 bits are judged by their error: leave out int8")
    stages = merge(fold(freeze(net)))
    known = shapes(net, stages)
    graphs = [StageGraph(write_stage(stage, known), stage.takes, stage.gives) for stage in stages]
    if not any(convolves(graph.model) for graph in graphs):
        raise NestlingError(f"{spec.name} has no convolutions, and only these become 8 bits: leave out int8")
    calibration, x, y = calibration_and_test(data, images)
    plain = OnnxEngine(graphs, known, spec.answer)
    verified = verify(plain, net, torch.from_numpy(x[:VERIFIED]))

    def in_8_bits() -> Iterator[tuple[bytes, tuple[str, ...], tuple[str, ...]]]:
        values = {"input": calibration}
        for graph in graphs:
            model = quantise_stage(graph.model, graph.takes, values)
            values |= outputs(model, graph.takes, graph.gives, values)
            yield model, graph.takes, graph.gives

    def complete(place: Path, manifest: Manifest) -> Manifest:
        engine = open_onnx(place, manifest)
        seen = run_all(engine, x, 32)
        after = [error(logits, y) for logits in seen]
        price: dict[str, Any] = {
            "images": len(y),
            "calibration_images": len(calibration),
            "calibrated_on": "training images" if len(data.train) else "test images that were left out of the errors",
            "error_before": [error(logits, y) for logits in run_all(plain, x, 32)],
            "error_after": after,
            "ms_before": [1e3 * t for t in warm_up(plain, spec.shape, 20)],
            "ms_after": [1e3 * t for t in warm_up(engine, spec.shape, 20)],
        }
        story = {**(manifest.about or {}), "verified": verified, "int8": price, "measured": here_and_now()}
        # The errors a user may expect are those of these graphs, not those of the run.
        known_now = replace(spec, errors=tuple(after))
        latencies, kept = tuple(warm_up(engine, spec.shape)), keep(place, Outcomes.of(seen, y))
        return replace(manifest, spec=known_now, latencies=latencies, about=story, held_out=kept)

    made = Manifest(spec, "onnx", "int8", (), known, (), {**about, "versions": versions("onnx")})
    return write_graphs(in_8_bits(), made, folder, complete)


def keep(place: Path, held_out: Outcomes) -> KnownFile:
    data = held_out.to_bytes()
    write_atomically(place / HELD_OUT, data)
    return KnownFile(HELD_OUT, checksum(data))


def here_and_now() -> dict[str, str]:
    """Where and when latencies are measured."""
    return {"on": device_name("cpu"), "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "threads": "1"}


def error(logits: Floats, labels: NDArray[np.int64]) -> float:
    return float((logits.argmax(1) != labels).mean())


def verify(engine: Engine, net: NestedNet, images: Tensor, batches: Sequence[int] = BATCHES) -> dict[str, Any]:
    """Compare every stage with the network itself on real images; raises if any logit is further off than TOLERANCE, or than four
    times what the network's own arithmetic is off."""
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
            off[stage] = float(np.maximum(off[stage], distance(logits, expected[stage])))  # NaN stays NaN
    allowed = [TOLERANCE] * engine.stages
    if not np.max(off) <= TOLERANCE:  # also if it is NaN
        allowed = [min(max(TOLERANCE, 4 * own), MOST) for own in rounding(net, images, expected)]
    bad = [stage for stage, (amount, most) in enumerate(zip(off, allowed, strict=True), start=1) if not amount <= most]
    if bad:
        raise NestlingError(
            f"the exported stage {bad[0]} differs from the network by {off[bad[0] - 1]:.1e} on {len(images)} images, "
            f"more than {allowed[bad[0] - 1]:.1g}; nothing was written. This is a bug: please report the network's recipe"
        )
    return {"images": len(images), "batches": list(batches), "largest_difference": off, "tolerance": max(allowed)}


def rounding(net: NestedNet, images: Tensor, expected: Sequence[Floats]) -> list[float]:
    """How far the network's own answers are off for rounding: the same weights in float64, beside them."""
    exact = copy.deepcopy(net).double().eval()
    with torch.no_grad():
        answers = exact(images.to(next(net.parameters()).device).double())
    return [distance(mine, theirs.cpu().numpy()) for mine, theirs in zip(expected, answers, strict=True)]


def distance(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest difference of logits, relative to the largest of them where that is above 10."""
    return float(np.abs(found - expected).max()) / max(1.0, float(np.abs(expected).max()) / 10)


def run_all(engine: Engine, images: Floats, batch: int) -> list[Floats]:
    """The logits of every stage (n,classes) by an engine, so many images at a time."""
    found: list[list[Floats]] = [[] for _ in range(engine.stages)]
    for start in range(0, len(images), batch):
        state = engine.start(np.ascontiguousarray(images[start : start + batch]))
        for stage in range(1, engine.stages + 1):
            logits, state = engine.step(stage, state, Stop())
            found[stage - 1].append(logits)
    return [np.concatenate(each) for each in found]
