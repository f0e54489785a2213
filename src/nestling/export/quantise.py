"""Stages in 8 bits: static quantisation of their convolutions, calibrated on real images.

In: a stage's ONNX graph and what it will be given. Out: a graph that computes convolutions in int8 (state and answers stay
float32). Each stage is to be calibrated on what the quantised stages before it give, so that it sees what it will see.
"""

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from onnxruntime import quantization
from torch import Tensor

from nestling.data import DataSet
from nestling.errors import NestlingError

CALIBRATION = 256  # images
Float32 = NDArray[np.float32]


def calibration_and_test(data: DataSet, count: int) -> tuple[Float32, Float32, NDArray[np.int64]]:
    """Images to calibrate on, and the first test images with their labels to judge by; 0 = all. Of data without training images,
    such as the sample that comes with us, the first test images calibrate and others judge."""
    if len(data.train):
        chance = torch.Generator().manual_seed(0)
        shown = next(iter(data.train.batches(min(CALIBRATION, len(data.train)), chance, augment=False)))[0]
        return shown.cpu().numpy(), *first_images(data, count)
    x, y = first_images(data, CALIBRATION + count if count else 0)
    if len(y) <= CALIBRATION:
        raise NestlingError(f"{data.name} has no training images, and {len(y)} test images are too few to calibrate on")
    return x[:CALIBRATION], x[CALIBRATION:], y[CALIBRATION:]


def first_images(data: DataSet, count: int) -> tuple[Float32, NDArray[np.int64]]:
    """The first test images and their labels; 0 = all."""
    count = min(count or len(data.test), len(data.test))
    kept: list[Tensor] = []
    labels: list[Tensor] = []
    for x, y in data.test.batches(256):
        kept.append(x.cpu())
        labels.append(y.cpu())
        if sum(map(len, kept)) >= count:
            break
    return torch.cat(kept)[:count].numpy(), torch.cat(labels)[:count].numpy()


def convolves(model: bytes) -> bool:
    """Whether there is anything in a stage's graph that would be in 8 bits."""
    import onnx

    return any(node.op_type == "Conv" for node in onnx.load_from_string(model).graph.node)


class CalibrationBatches(quantization.CalibrationDataReader):
    """Hands the values a stage takes to the calibrator, eight images at a time."""

    def __init__(self, takes: Sequence[str], values: Mapping[str, Float32], batch: int = 8) -> None:
        count = len(values["input"])
        self.batches: Iterator[dict[str, Float32]] = iter(
            [{name: values[name][i : i + batch] for name in takes} for i in range(0, count, batch)]
        )

    def get_next(self) -> dict[str, Float32] | None:
        return next(self.batches, None)


def quantise_stage(model: bytes, takes: Sequence[str], values: Mapping[str, Float32]) -> bytes:
    """One stage with 8-bit convolutions, a scale per output channel, calibrated on these values."""
    import onnx

    read = onnx.load_from_string(model)
    # The convolutions that only add zero channels are exact as they are.
    exact = [node.name for node in read.graph.node if any(name.endswith(".identity") for name in node.input)]
    with tempfile.TemporaryDirectory() as scratch, quietly():
        path = Path(scratch) / "stage.onnx"
        quantization.quantize_static(
            read,
            str(path),
            CalibrationBatches(takes, values),
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


def outputs(
    model: bytes, takes: Sequence[str], gives: Sequence[str], values: Mapping[str, Float32]
) -> dict[str, Float32]:
    """What a stage gives for these values."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    feed = {name: values[name] for name in takes}
    return dict(zip(gives, session.run(list(gives), feed), strict=True)) if gives else {}
