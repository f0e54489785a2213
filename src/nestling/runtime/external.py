"""Whether an ONNX graph keeps tensors in other files: such a graph is not what its checksum says.

In: the bytes of a model, which may come from anywhere. Out: True if any tensor in it, however deep, has external data, which
ONNX Runtime would read from a path of the graph's choosing; ValueError where the bytes are no protocol buffer. Follows the
messages that may hold tensors and skips the rest, without the onnx package and without recursion.
"""

from collections.abc import Iterator

# message -> {field number: message in it}, as in onnx.proto
MESSAGES: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
EXTERNAL_DATA, DATA_LOCATION = 13, 14  # fields of a tensor: where its data lie, and whether (1) they lie elsewhere
VARINT, EIGHT_BYTES, LENGTH, FOUR_BYTES = 0, 1, 2, 5  # how a field is written


def has_external_data(model: bytes) -> bool:
    """Whether any tensor of an ONNX model lies outside it."""
    todo = [("model", 0, len(model))]
    while todo:
        kind, start, stop = todo.pop()
        for number, value, length in fields(model, start, stop):
            if kind == "tensor" and (number == EXTERNAL_DATA or (number == DATA_LOCATION and value)):
                return True
            inner = MESSAGES[kind].get(number)
            if inner is not None and length is not None:
                todo.append((inner, value, value + length))
    return False


def fields(data: bytes, start: int, stop: int) -> Iterator[tuple[int, int, int | None]]:
    """(number, value, None) of each number, and (number, place, length) of whatever else is in a message."""
    while start < stop:
        tag, start = varint(data, start, stop)
        number, form = tag >> 3, tag & 7
        length: int | None = None
        if form == VARINT:
            value, end = varint(data, start, stop)
        else:
            if form == LENGTH:
                length, start = varint(data, start, stop)
            elif form in (EIGHT_BYTES, FOUR_BYTES):
                length = 8 if form == EIGHT_BYTES else 4
            else:
                raise ValueError(f"a field is written in the form {form}")
            value, end = start, start + length
            if end > stop:
                raise ValueError("a field is longer than the message that holds it")
        yield number, value, length
        start = end


def varint(data: bytes, start: int, stop: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
    value = 0
    for count, place in enumerate(range(start, min(stop, start + 10))):
        value |= (data[place] & 127) << (7 * count)
        if data[place] < 128:
            return value, place + 1
    raise ValueError("a number does not end")
