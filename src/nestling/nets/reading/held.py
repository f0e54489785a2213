"""What a module holds for its operations: parameters and buffers, as the layers that are made of them.

In: a traced operation and the page it belongs on. Out: a constant; the layer that a function on the module's own tensors stands
for; which node first used a layer's weights. A refusal where births could not cut them. Nodes are pen.py's.
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from nestling.errors import NestlingError
from nestling.nets.ops import Operation
from nestling.nets.ops.weighted_op import WeightedOp
from nestling.nets.plan import Node
from nestling.nets.reading.recorded import Recorder, Unknown
from nestling.nets.reading.shells import Shell
from nestling.nets.reading.sketch import Page
from nestling.nets.reading.vocabulary import METHODS, SHAPING
from nestling.nets.reading.watcher import attribute


def constant_of(page: Page, node: fx.Node, constant: fx.Node) -> tuple[Tensor, str] | None:
    """A parameter or buffer that was only brought into shape, with its path; or what is computed from buffers alone. None where
    parameters are computed with, which births cannot cut."""
    source = constant
    while source.op != "get_attr" and is_shaping(page, source):
        source = source.all_input_nodes[0]
    if source.op == "get_attr":
        try:
            return page.trace.held(str(source.target)), str(source.target)
        except AttributeError:
            page.refuse(node, "it reads a tensor that is made while running; keep it as a buffer")
    recorder = Recorder(page.trace, {}, {})
    try:
        recorder.step(constant, constant)
    except Unknown as error:
        page.refuse(node, str(error))
    if any(p.requires_grad for p in recorder.piece.parameters()):
        return None
    with torch.no_grad():
        return recorder.piece().detach(), ""


def is_shaping(page: Page, node: fx.Node) -> bool:
    """Whether an operation leaves all numbers of a constant as they are."""
    base = METHODS.get(node.target, node.target)
    made, *given = (page.values[each] for each in (node, *node.all_input_nodes))
    if not (isinstance(made, Tensor) and given and isinstance(given[0], Tensor)):  # one of several parts, say
        return False
    whole = base is not operator.getitem or made.numel() == given[0].numel()
    return base in SHAPING and whole and made.dtype == given[0].dtype


def numbers_cut(page: Page, node: fx.Node, constant: fx.Node, read: str) -> tuple[Tensor, str, tuple[int, ...]] | None:
    """A parameter or buffer that births can cut, its path, and the sides of each channel's numbers."""
    shape, axis, size = tuple(page.values[constant].shape), page.axis(read), page.sketch.nodes[read].size
    wide = (1,) * (len(size) + 2 - len(shape)) + shape
    sides = (*wide[1:axis], *wide[axis + 1 :])
    plain = len(wide) == len(size) + 2 and wide[0] == 1 and wide[axis] in (1, page.channels(read))
    found = constant_of(page, node, constant) if plain and fits(sides, size) else None
    if found is None:
        return None
    pixels = sides if any(side > 1 for side in sides) else ()
    held, path = found
    whole = (1,) * (len(wide) - held.dim()) + tuple(held.shape) == wide and wide[axis] == page.channels(read)
    if pixels and isinstance(held, nn.Parameter) and not whole:
        return None
    return held if not pixels or isinstance(held, nn.Parameter) else held.reshape(wide), path, pixels


def fits(sides: tuple[int, ...], size: tuple[int, ...]) -> bool:
    """Whether numbers along some sides are one for all or one for each."""
    return len(sides) == len(size) and all(side in (1, most) for side, most in zip(sides, size, strict=True))


def own(page: Page, node: fx.Node, name: str, layer: nn.Module, op: Operation) -> str:
    """Remember a layer with parameters; returns the node whose weights it uses, if it is not the first to use them."""
    mine = list(layer.parameters(recurse=False))
    for parameter in mine:
        if not parameter.is_floating_point():
            page.refuse(node, f"its weights are {parameter.dtype}; nest the network in floating point, then quantise")
    held: list[Tensor] = [*mine] or [b for b in layer.buffers(recurse=False) if b.dim()]
    first = {page.weights_of.setdefault(id(tensor), name) for tensor in held}
    if first <= {name} or page.whole:  # where nothing is trained, each place may have a copy
        page.sketch.layers[name] = layer
        return ""
    sharer = first.pop()
    theirs, known = page.sketch.layers.get(sharer, layer), page.sketch.nodes.get(sharer)  # none: a constant's
    whole = not first and known is not None and type(known.op) is type(op)
    if not whole or (mine and {*map(id, mine)} != {*map(id, theirs.parameters(recurse=False))}):
        page.refuse(node, "some of its parameters serve other places too, in part or as something else")
    if not op.weighted and page.sketch.nodes[sharer].op != op:
        page.refuse(
            node, f"its parameters serve {sharer} too, with other numbers ({op}, {page.sketch.nodes[sharer].op})"
        )
    return sharer


def held_as(page: Page, node: fx.Node, word: str, given: Any) -> Tensor | None:
    """The module's tensor that is given as an argument, if one is."""
    if not isinstance(given, fx.Node):
        return None
    if given.op != "get_attr":
        page.refuse(node, f"its {word} is computed while running, so it cannot be cut by births")
    return attribute(page.module, str(given.target))


def made_weight(page: Page, node: fx.Node, given: fx.Node) -> nn.Parameter:
    """A weight that is made of the module's own tensors, as it is now: standardised, masked, or a blur for each channel."""
    if given in page.trace.twins:
        page.refuse(
            node,
            "its weight is computed from the image (a mixture of kernels, say), so that it is no weight that births could cut. "
            "Use an ordinary convolution there",
        )
    twin = page.trace.twins[node][0]
    place = next(i for i, n in enumerate(node.all_input_nodes) if n is given)
    pieces = []
    for each in (given, twin.all_input_nodes[place]):
        recorder = Recorder(page.trace, {}, {})
        try:
            recorder.step(each, each)
        except Unknown as error:
            page.refuse(node, str(error))
        pieces.append(recorder.piece)
    with torch.no_grad():
        training, evaluation = (piece().detach() for piece in pieces)
    if page.whole or not torch.equal(training, evaluation):
        page.refuse(node, "its weight is computed while running, in training otherwise than in evaluation")
    learnt, name = any(p.requires_grad for p in pieces[0].parameters()), page.name(node)
    sources = {str(n.target) for n in sources_of(given)}
    for source in sorted(sources) if learnt else ():
        if page.weights_of.setdefault(id(page.trace.held(source)), name) != name:
            page.refuse(node, f"its weight is made of {source}, which serves other places too; give each its own")
    if learnt:
        page.sketch.made.append((name, sources))
    return nn.Parameter(training.clone(), requires_grad=learnt)


def sources_of(node: fx.Node) -> list[fx.Node]:
    """The module's own tensors that something is made of."""
    return [node] if node.op == "get_attr" else [n for read in node.all_input_nodes for n in sources_of(read)]


def functional_layer(page: Page, node: fx.Node, kind: type[WeightedOp], given: dict[str, Any]) -> nn.Module:
    computed = given["weight"].op != "get_attr"
    weight = made_weight(page, node, given["weight"]) if computed else held_as(page, node, "weight", given["weight"])
    bias = held_as(page, node, "bias", given.get("bias"))
    assert weight is not None
    if not isinstance(weight, nn.Parameter):  # a fixed kernel, such as a blur
        weight = page.memo.setdefault(id(weight), nn.Parameter(weight, requires_grad=False))
    layer = kind.torch_layer(weight, bias is not None, {word: given[word] for word in kind.words if word in given})
    layer.weight = weight
    if bias is not None:
        if not isinstance(bias, nn.Parameter):
            page.refuse(node, f"its bias {given['bias'].target} is no parameter of the module")
        layer.bias = bias
    return layer


def norm_layer(
    page: Page, node: fx.Node, shell: Shell, training: dict[str, Any], evaluation: dict[str, Any], read: Node
) -> nn.Module:
    tensors = {word: held_as(page, node, word, training.get(word)) for word in shell.tensors}
    try:
        return shell.layer(training, evaluation, tensors, read)
    except NestlingError as error:
        page.refuse(node, str(error))
