"""Tensors of the Open Inference Protocol: datatypes, shapes and bytes to arrays and back.

In: what a client says of a tensor, in JSON, as raw bytes or as protobuf's numbers. Out: arrays, or a Refusal that says what is
wrong. https://github.com/kserve/open-inference-protocol and Triton's extension for binary tensors. Knows no network.
"""

import struct
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestling.runtime.inputs import short
from nestling.serve.refusal import Refusal

DATATYPES: dict[str, np.dtype[Any]] = {"UINT8": np.dtype("<u1"), "FP32": np.dtype("<f4")}  # of inputs
NAMES = {"<f4": "FP32", "<i4": "INT32", "<i8": "INT64", "|b1": "BOOL", "|O": "BYTES"}  # of outputs
Tensor = NDArray[Any]


def shape_of(shape: Any, most: int) -> tuple[int, ...]:
    """A shape that a client gave; at most so many values."""
    sides = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str | bytes) else ()
    if not sides or not all(isinstance(side, int) and not isinstance(side, bool) and side >= 1 for side in sides):
        raise Refusal(
            "wrong", f"found the shape {short(shape)}; expected a list of whole numbers from 1, such as [1, 3, 32, 32]"
        )
    if len(sides) > 8 or prod(sides) > most:
        raise Refusal("too large", f"found the shape {short(shape)}; expected at most {most:,} values")
    return sides


def most_values(shape: Sequence[int], images: int) -> int:
    """Of an input with so many images."""
    return prod(shape) * images


def dtype_of(datatype: Any) -> np.dtype[Any]:
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise Refusal("wrong", f"found the datatype {short(datatype)}; expected UINT8 (0 to 255) or FP32 (normalised)")
    return DATATYPES[datatype]


def from_bytes(raw: bytes | memoryview, datatype: Any, shape: tuple[int, ...]) -> Tensor:
    dtype = dtype_of(datatype)
    if len(raw) != prod(shape) * dtype.itemsize:
        expected = f"{prod(shape) * dtype.itemsize:,} for {datatype} {list(shape)}"
        raise Refusal("wrong", f"found {len(raw):,} bytes of a tensor, expected {expected}")
    return np.frombuffer(raw, dtype).reshape(shape)


def from_values(values: Any, datatype: Any, shape: tuple[int, ...]) -> Tensor:
    """Numbers, flat or nested as the shape is."""
    dtype = dtype_of(datatype)
    try:
        found = np.asarray(values)
    except (ValueError, TypeError, OverflowError, RecursionError):
        found = np.array(None)
    kinds = "iu" if dtype.kind == "u" else "iuf"
    if found.dtype.kind not in kinds or found.size != prod(shape):
        what = f"{found.size:,} values" if found.dtype.kind in kinds else "data that are not all numbers of that kind"
        raise Refusal("wrong", f"found {what}, expected {prod(shape):,} of {datatype} for the shape {list(shape)}")
    # Nested in another way, channels last, say, they would be mixed up. Sides of 1 change no order.
    if found.ndim > 1 and [side for side in found.shape if side > 1] != [side for side in shape if side > 1]:
        raise Refusal(
            "wrong",
            f"found data nested as {list(found.shape)} for the shape {list(shape)}; nest them so, or send them flat",
        )
    if dtype.kind == "u" and found.size and not (found.min() >= 0 and found.max() <= 255):
        raise Refusal("wrong", "found UINT8 values outside 0 to 255; send normalised pixels as FP32")
    with np.errstate(over="ignore"):  # what is infinite in 32 bits is refused with the other pixels that are no numbers
        return found.reshape(shape).astype(dtype)


def name_of(tensor: Tensor) -> str:
    """The datatype of an output."""
    return NAMES[tensor.dtype.newbyteorder("<").str]


def to_bytes(tensor: Tensor) -> bytes:
    """Little-endian, row by row; strings each behind its length."""
    if tensor.dtype == object:
        return b"".join(struct.pack("<I", len(each)) + each for each in tensor.flat)
    return tensor.tobytes()


def to_values(tensor: Tensor) -> list[Any]:
    """For JSON: flat."""
    if tensor.dtype == object:
        return [each.decode() for each in tensor.flat]
    found: list[Any] = tensor.ravel().tolist()
    return found
