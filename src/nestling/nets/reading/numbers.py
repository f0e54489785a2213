"""Constants of a module beside what it computes from the image, in the form of a plan's node.

In: a traced tensor that depends on parameters and buffers alone, and where the channels and pixels stand in what it is combined
with. Out: a module that takes nothing and gives the numbers of each channel, (channels, *pixels), as `Computed` reads them.
"""

from typing import Any, NoReturn

import torch
from torch import fx
from torch.nn.modules.dropout import _DropoutNd

from nestling.nets.ops.operation import Extent
from nestling.nets.reading.layout import Arrangement, Factor, channel_factors, size_of
from nestling.nets.reading.recorded import Made, Recorded, Recorder, Unknown
from nestling.nets.reading.sketch import Page

LENT = "(constants)"


def numbers_beside(page: Page, node: fx.Node, constant: fx.Node, layout: Arrangement) -> tuple[Recorded, Extent]:
    """The module, and how many numbers a channel has along each of its sides, as `Scale` counts them."""
    shape = tuple(page.values[constant].shape)
    wide = (1,) * (len(layout.dims) - len(shape)) + shape
    fits = len(wide) == len(layout.dims) and all(s in (1, whole) for s, whole in zip(wide, layout.shape, strict=True))
    if not fits:
        page.refuse(node, f"its constant has the shape {shape}; expected one that fits into {layout.shape}")
    recorder = Recorder(page.trace, {}, {}, copies=False)
    try:
        first = recorder.tensor(constant, constant)
    except Unknown as error:
        page.refuse(node, str(error))
    piece, view = recorder.piece, list[int]()
    factors: list[Factor] = []
    for dim, side in zip(layout.dims, wide, strict=True):
        factors += dim
        view += [factor.size if side > 1 else 1 for factor in dim]
    there = dict(zip(map(id, factors), view, strict=True))
    batch = next(f for f in factors if f.kind == "batch")
    channels = channel_factors(layout.dims)
    sides = [tuple(dim) for d, dim in enumerate(layout.base) if d not in (0, layout.axis)]
    order = [batch, *channels, *(f for dim in sides for f in dim)]
    whole = [dim and any(there[id(f)] > 1 for f in dim) for dim in sides]
    spread = [f.size for f in channels]
    spread += [f.size if wanted else 1 for dim, wanted in zip(sides, whole, strict=True) for f in dim]
    pixels = tuple(size_of(dim) if wanted else 1 for dim, wanted in zip(sides, whole, strict=True))
    pixels = pixels if any(side > 1 for side in pixels) else ()
    turned = _then(piece, "permute", _then(piece, "reshape", first, tuple(view)), tuple(map(factors.index, order)))
    if there[id(batch)] > 1:
        check_alike(page, node, piece)
    image = _then(piece, "select", turned, 0, 0)
    _then(piece, "reshape", _then(piece, "expand", image, tuple(spread)), (-1, *pixels))
    own_all(page, node, piece)
    return piece, pixels


def _then(piece: Recorded, method: str, read: Any, *arguments: Any) -> Made:
    piece.steps.append(("call_method", method, (read, *arguments), {}))
    return Made(len(piece.steps) - 1)


def check_alike(page: Page, node: fx.Node, piece: Recorded) -> None:
    """Numbers that a module spreads over its images must be the same for each."""
    with torch.no_grad():
        made = piece()
    if not made.is_meta and not torch.equal(made[:1].expand_as(made), made):
        page.refuse(node, "its constant is not the same for each image of a batch")


def own_all(page: Page, node: fx.Node, piece: Recorded) -> None:
    """Remember whose parameters these are. What another constant holds, whole layers too, is borrowed."""
    owed: dict[str, set[tuple[Recorded, str]]] = {}  # what this piece holds, and who has it already
    for name, parameter in piece.named_parameters():
        lender, theirs = page.lenders.setdefault(id(parameter), (piece, name))
        if page.weights_of.setdefault(id(parameter), LENT) != LENT:
            refuse_shared(page, node)
        owed.setdefault(name.partition(".")[0], set()).add((lender, theirs.partition(".")[0]))
    for name, holders in owed.items():
        (lender, theirs), *others = holders
        if others:
            refuse_shared(page, node)
        if lender is not piece:
            if getattr(lender, theirs) is not getattr(piece, name):
                refuse_shared(page, node)
            piece.borrow(name, lender, theirs)
    if piece.borrowed and any(isinstance(layer, _DropoutNd) and layer.p > 0 for layer in piece.modules()):
        page.refuse(
            node,
            "its constant serves several places and is made with dropout, of which each place would draw its own; set p=0 there",
        )


def refuse_shared(page: Page, node: fx.Node) -> NoReturn:
    page.refuse(
        node, "its constant is made of parameters that serve other places too; give each place parameters of its own"
    )
