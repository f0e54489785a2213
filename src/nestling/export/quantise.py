"""Stages in 8 bits: static quantisation of their convolutions, calibrated on real images, with its price stated.

In: a network, its data set, how many images to judge by. Out: an exported folder whose graphs compute convolutions in int8
(state and answers stay float32), and in its manifest the error of every stage before and after on the same test images.
Each stage is calibrated on what the quantised stages before it give, so that it sees what it will see.
"""

import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnxruntime import quantization
from torch import Tensor

from nestling.data import DataSet
from nestling.errors import NestlingError
from nestling.export.fold import fold, merge
from nestling.export.freeze import freeze, shapes
from nestling.export.graph import write_stage
from nestling.export.write import run_all, save, verify, versions, whole_folder
from nestling.files import write_atomically
from nestling.nets import NestedNet
from nestling.runtime.engine import Floats, warm_up
from nestling.runtime.engines.onnx import OnnxEngine, StageGraph
from nestling.runtime.manifest import Manifest, StageFile, checksum
from nestling.runtime.portable import open_engine
from nestling.runtime.spec import Spec

CALIBRATION = 256  # training images
VERIFIED = 64


def export_int8(
    net: NestedNet, spec: Spec, folder: Path, data: DataSet, images: int, about: Mapping[str, Any]
) -> Manifest:
    """Write a network's stages in 8 bits. The float32 graphs they are made from are verified first."""
    stages = merge(fold(freeze(net)))
    known = shapes(net, stages)
    graphs = [StageGraph(write_stage(stage, known), stage.takes, stage.gives) for stage in stages]
    classes = len(spec.classes)
    x, y = first_images(data, images)
    plain = OnnxEngine(graphs, known, classes)
    verified = verify(plain, net, torch.from_numpy(x[:VERIFIED]))
    before = run_all(plain, x, 32)
    values = {"input": calibration_images(data)}
    with whole_folder(folder) as place:
        files: list[StageFile] = []
        for number, graph in enumerate(graphs, start=1):
            model = quantise_stage(graph, values)
            values |= outputs(StageGraph(model, graph.takes, graph.gives), values)
            name = f"stage{number}.onnx"
            write_atomically(place / name, model)
            files.append(StageFile(name, checksum(model), graph.takes, graph.gives))
        passed = {name: known[name] for file in files for name in ("input", *file.takes, *file.gives)}
        manifest = Manifest(spec, "onnx", "int8", tuple(files), passed)
        engine = open_engine(place, save(place, manifest))
        after = run_all(engine, x, 32)
        price: dict[str, Any] = {
            "images": len(y),
            "calibration_images": CALIBRATION,
            "error_before": [error(logits, y) for logits in before],
            "error_after": [error(logits, y) for logits in after],
            "ms_before": [1e3 * t for t in warm_up(plain, spec.shape, 20)],
            "ms_after": [1e3 * t for t in warm_up(engine, spec.shape, 20)],
        }
        latencies = tuple(warm_up(engine, spec.shape))
        story = {**about, "versions": versions("onnx"), "verified": verified, "int8": price}
        # The errors a user may expect are those of these graphs, not those of the run.
        after_spec = replace(spec, errors=tuple(price["error_after"]))
        manifest = replace(manifest, spec=after_spec, latencies=latencies, about=story)
        save(place, manifest)
    return manifest


def error(logits: Floats, labels: NDArray[np.int64]) -> float:
    return float((logits.argmax(1) != labels).mean())


def first_images(data: DataSet, count: int) -> tuple[Floats, NDArray[np.int64]]:
    """The first test images and their labels; 0 = all."""
    count = min(count or len(data.test), len(data.test))
    kept: list[Tensor] = []
    for x, _ in data.test.batches(256):
        kept.append(x.cpu())
        if sum(map(len, kept)) >= count:
            break
    return torch.cat(kept)[:count].numpy(), data.test.labels[:count].cpu().numpy()


def calibration_images(data: DataSet, count: int = CALIBRATION) -> Floats:
    """Training images as the test shows them: not augmented, drawn with a fixed seed."""
    for x, _ in data.train.batches(min(count, len(data.train)), torch.Generator().manual_seed(0), augment=False):
        return x.cpu().numpy()
    raise NestlingError(f"{data.name} has no training images to calibrate on")


class Reader(quantization.CalibrationDataReader):
    """Hands the values a stage takes to the calibrator, eight images at a time."""

    def __init__(self, graph: StageGraph, values: Mapping[str, Floats], batch: int = 8) -> None:
        count = len(values["input"])
        self.batches: Iterator[dict[str, Floats]] = iter(
            [{name: values[name][i : i + batch] for name in graph.takes} for i in range(0, count, batch)]
        )

    def get_next(self) -> dict[str, Floats] | None:
        return next(self.batches, None)


def quantise_stage(graph: StageGraph, values: Mapping[str, Floats]) -> bytes:
    """One stage with 8-bit convolutions, a scale per output channel, calibrated on these values."""
    import onnx

    model = onnx.load_from_string(graph.model)
    # The convolutions that only add zero channels are exact as they are.
    exact = [node.name for node in model.graph.node if any(read.endswith(".identity") for read in node.input)]
    with tempfile.TemporaryDirectory() as scratch, quietly():
        path = Path(scratch) / "stage.onnx"
        quantization.quantize_static(
            model,
            str(path),
            Reader(graph, values),
            quant_format=quantization.QuantFormat.QDQ,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            per_channel=True,
            op_types_to_quantize=["Conv"],
            nodes_to_exclude=exact,
        )
        return path.read_bytes()


@contextmanager
def quietly() -> Iterator[None]:
    """Without the quantiser's advice to prepare the graph first: it is written the way it should be."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def outputs(graph: StageGraph, values: Mapping[str, Floats]) -> dict[str, Floats]:
    """What a stage gives for these values."""
    import onnxruntime

    session = onnxruntime.InferenceSession(graph.model, providers=["CPUExecutionProvider"])
    feed = {name: values[name] for name in graph.takes}
    return dict(zip(graph.gives, session.run(list(graph.gives), feed), strict=True)) if graph.gives else {}
