"""A trained network that answers on the way: `exits(module, at=(0.25, 0.5))`, births in depth.

In: a module that turns an image into logits, and where it is to answer early: shares of its multiply-accumulates, or names
of its modules. Out: a NestedNet whose last answer is the module's own, bit for bit, with a small head after each of these
places. The module's layers are frozen and stay in evaluation; only heads are trained. A block is born at the first exit that
needs it, so that what lies behind an exit is not computed before its answer is out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from nestling.errors import NestlingError, nearest
from nestling.nets.extended import Extended
from nestling.nets.ops import BatchNorm, Conv, Linear, Map, Mean, Opaque
from nestling.nets.ops.calls import Call
from nestling.nets.plan import Node, Plan
from nestling.nets.reading.assemble import Assembled, built, fitted
from nestling.nets.reading.baked import baked
from nestling.nets.reading.ours import ours
from nestling.nets.reading.read import Reader, read_whole
from nestling.nets.reading.sketch import Sketch
from nestling.nets.reading.ties import groups_of
from nestling.nets.reading.trace import BATCHES, Shape
from nestling.nets.reading.watcher import path_of

HEADS = ("linear", "conv")
NEAR = 0.25  # of the work: how far from the share that was asked for an exit may stand


def exits(
    module: nn.Module,
    at: Sequence[float | str] = (0.25, 0.5),
    shape: Shape = (3, 32, 32),
    head: str = "linear",
    width: int = 128,
    name: str = "",
    generator: torch.Generator | None = None,
) -> Extended:
    """The module with an exit after each place of `at`: a share of its MACs, or the name of one of its modules.

    A head is pooling, batch norm and a linear layer; "conv" puts two 3x3 convolutions of stride 2 to `width` channels before
    it, as the paper's early exits have.
    """
    net = name or type(module).__name__
    if not isinstance(module, nn.Module):
        raise NestlingError(f"found a {net}, {module!r}; expected a torch module that turns images into logits")
    check(at, head, width, net)
    reader = read_whole(baked(module, net)[0], shape, net)
    places = chosen(reader, at, net)
    with torch.random.fork_rng(devices=[]):  # torch draws weights for every new layer
        made = planned(reader, places, head, width, net)
    found = made.net
    assert isinstance(found, Extended)
    found.hold(name for name in made.origins if name in found.plan.by_name)
    found._copied = copied(reader)
    found.reset(generator if generator is not None else torch.Generator().manual_seed(0))
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.zeros(0))
    for node in found.plan.nodes:
        if node.op.layered and node.name not in made.origins:
            found.layer(node.name).to(device=like.device, dtype=like.dtype)
    prove(module, found, shape, net)
    return found.train(module.training)


def check(at: Any, head: str, width: Any, net: str) -> None:
    listed = at if isinstance(at, tuple | list) and at else ()
    shares = [place for place in listed if not isinstance(place, str)]
    if not listed or not all(type(share) in (int, float) and 0 < share < 1 for share in shares):
        raise NestlingError(
            f"{net}: found exits at {at!r}; expected a list of shares of the module's work between 0 and 1, or of names of its "
            'modules, such as (0.25, 0.5) or ("layer1", "layer2")'
        )
    if head not in HEADS or type(width) is not int or width < 1:
        raise NestlingError(
            f"{net}: found a head {head!r} of width {width!r}; expected one of {', '.join(HEADS)} and a number"
        )


# --- where ------------------------------------------------------------------------------------------------------------


def chosen(reader: Reader, at: Sequence[float | str], net: str) -> list[tuple[fx.Node, str]]:
    """The tensor after which each exit stands, in the order in which they are computed, with the name in the sketch."""
    order = reader.trace.record.nodes
    work = own_work(reader)
    found = [named(reader, place, net) for place in at if isinstance(place, str)]
    for share in sorted(place for place in at if not isinstance(place, str)):
        taken = {work[str(reader.first_names[node])] for node in found}
        found.append(shared(reader, share, work, taken, net))
    kept = sorted({*found}, key=order.index)
    if len(kept) < len(at):
        raise NestlingError(
            f"{net}: several of the exits {tuple(at)} fall on the same place, as after {reader.first_names[kept[0]]}; ask for "
            "fewer"
        )
    names = [(node, reader.first_names[node]) for node in kept]
    late = [str(name) for _, name in names if work[str(name)] == work[reader.sketch.output]]
    if late:
        raise NestlingError(
            f"{net}: nothing is left to do after {late[0]}: an exit there would be the module's own answer; ask for an "
            "earlier one"
        )
    return [(node, str(name)) for node, name in names]


def own_work(reader: Reader) -> dict[str, int]:
    """How many MACs each node of the sketch needs, with all that it is computed from."""
    nodes = reader.sketch.nodes
    macs, needed, found = [], dict[str, int](), dict[str, int]()
    for number, node in enumerate(nodes.values()):
        there = replace(node, births=(1,) * node.channels)
        reads = [replace(nodes[read], births=(1,) * nodes[read].channels) for read in node.reads]
        macs.append(sum(there.op.macs(there, reads)))
        mine = 1 << number  # a bit for each node that is needed
        for read in node.reads:
            mine |= needed[read]
        needed[node.name] = mine
        found[node.name] = sum(each for place, each in enumerate(macs) if mine >> place & 1)
    return found


def shared(reader: Reader, share: float, work: dict[str, int], taken: set[int], net: str) -> fx.Node:
    """The place where one tensor holds all that goes on, nearest to a share of the work; the deepest of equally near ones.

    Where none is near, because branches run side by side, the map of features whose own work is nearest. After other work
    than those that are taken."""
    most = work[reader.sketch.output]
    full = list(separators(reader))
    others = [(index, node) for index, node in enumerate(reader.trace.record.nodes) if is_map(reader.values[node])]
    for candidates, limit in ((full, NEAR), (others, 1.0), (full, 1.0)):
        near = []
        for index, node in candidates:
            name = reader.first_names.get(node)
            if not isinstance(name, str) or work[name] == most or work[name] in taken:
                continue  # nothing would be left to do after it, or not more than after another
            if is_feature(reader.values[node]):
                near.append((abs(work[name] - share * most), -index, node))
        if near and min(near, key=lambda each: each[:2])[0] <= limit * most:
            return min(near, key=lambda each: each[:2])[2]
    raise NestlingError(
        f"{net}: it has no further tensor of features that an exit could read. Ask for fewer, or name the modules after which "
        'it should answer, such as at=("layer1",)'
    )


def separators(reader: Reader) -> Iterator[tuple[int, fx.Node]]:
    """The operations after which nothing that was computed before them is read any more."""
    record = reader.trace.record
    order = {node: index for index, node in enumerate(record.nodes)}
    last_read = {node: max((order.get(user, -1) for user in node.users), default=-1) for node in (record.image, *order)}
    reach = last_read[record.image]
    for index, node in enumerate(record.nodes):
        if reach <= index:
            yield index, node
        reach = max(reach, last_read[node])


def named(reader: Reader, path: str, net: str) -> fx.Node:
    """What a module gives: the last operation inside it."""
    inside = [
        node
        for node in reader.trace.record.nodes
        if isinstance(reader.first_names.get(node), str)
        and (own_path(node) == path or own_path(node).startswith(f"{path}."))
    ]
    if not inside:
        known = {p for n in reader.trace.record.nodes for p in prefixes(own_path(n))}
        raise NestlingError(f"{net}: no module {path!r} runs in it; did you mean {nearest(path, known)}?")
    if not is_feature(reader.values[inside[-1]]):
        raise NestlingError(
            f"{net}: {path} gives a tensor of shape {tuple(reader.values[inside[-1]].shape)}, no features of an image"
        )
    return inside[-1]


def own_path(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else path_of(node)


def prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1) if parts[0]]


def is_map(value: Any) -> bool:
    """Features of pixels or tokens, and not one number for each channel, as a gate has."""
    return is_feature(value) and value.dim() > 2 and min(value.shape[2:]) > 1


def is_feature(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() in (2, 3, 4) and value.is_floating_point()


# --- the plan ---------------------------------------------------------------------------------------------------------


def planned(reader: Reader, places: list[tuple[fx.Node, str]], head: str, width: int, net: str) -> Assembled:
    """The backbone with births by the first exit that needs each node, and the heads."""
    stages = len(places) + 1
    known = ours(reader.sketch)
    whole = all(name in known.nodes for _, name in places)  # else an exit reads what would be part of another operation
    sketch, renamed = fitted(known if whole else reader.sketch, [f"exit{stage}" for stage in range(1, stages)])
    new = {old: name for name, old in renamed.items()}
    ends = [new[name] for _, name in places] + [sketch.output]
    births = first_needed(sketch, ends)
    nodes = [replace(n, births=(births[n.name],) * n.channels) for n in sketch.nodes.values() if n.name in births]
    classes = sketch.nodes[sketch.output].channels
    layers: dict[str, nn.Module] = dict(sketch.layers)
    heads = []
    for stage, (node, end) in enumerate(zip((node for node, _ in places), ends, strict=False), start=1):
        parts = drawn_head(f"exit{stage}", stage, sketch.nodes[end], reader.values[node], classes, head, width)
        nodes += [part for part, _ in parts]
        layers |= {part.name: layer for part, layer in parts if layer is not None}
        heads.append(parts[-1][0].name)
    if sketch.nodes[sketch.output].size:
        raise NestlingError(
            f"{net}: its answer is a tensor of shape (N, {classes}, ...); exits answer with one row of logits"
        )
    sizes = (*(f"exit{stage}" for stage in range(1, stages)), "full")
    plan = put_off(Plan(net, tuple(nodes), (*heads, sketch.output), sizes))
    return built(plan, layers, {name: renamed[name] for name in sketch.nodes if name in layers}, False, Extended)


def copied(reader: Reader) -> tuple[str, ...]:
    """The layers with parameters of which another has a copy: places with the same weights may be born at different stages."""
    origin = {id(copy): key for key, copy in reader.memo.items() if isinstance(copy, nn.Parameter)}
    places = dict[int, dict[str, None]]()
    for name, layer in reader.sketch.layers.items():
        given = reader.sketch.nodes[name].op.given
        for parameter in layer.parameters(recurse=given):
            key = id(parameter)
            places.setdefault(origin.get(key, key), {})[name] = None
    together = {key for key in origin.values() if all(reader.sketch.nodes[n].op.given for n in places.get(key, ()))}
    several = [names for key, names in places.items() if len(names) > 1 and key not in together]
    return tuple(dict.fromkeys(name for names in several for name in names))


def first_needed(sketch: Sketch, ends: list[str]) -> dict[str, int]:
    """The first stage whose answer needs each node."""
    births: dict[str, int] = {}
    for stage, end in enumerate(ends, start=1):
        open_ends = [end]
        while open_ends:
            name = open_ends.pop()
            if name not in births:
                births[name] = stage
                open_ends += sketch.nodes[name].reads
    births[next(iter(sketch.nodes))] = 1
    return births


def put_off(plan: Plan) -> Plan:
    """Channels of a layer that no answer needs as early as its others (parts that go their own ways) are born later."""
    bound = {node.shares for node in plan.nodes}
    nodes = []
    for node in plan.nodes:
        alone = node.op.weighted and not node.shares and node.name not in bound
        if alone and not groups_of(node, plan.by_name[node.reads[0]]):
            first = [(owned & -owned).bit_length() for owned in plan.owners[node.name]]  # 0: none, which settles later
            node = replace(node, births=tuple(map(max, node.births, first)))
        nodes.append(node)
    return replace(plan, nodes=tuple(nodes))


def drawn_head(
    at: str, stage: int, source: Node, value: Tensor, classes: int, head: str, width: int
) -> list[tuple[Node, nn.Module | None]]:
    """The nodes of one exit, with the layers of those that somebody has to hand over."""
    parts: list[tuple[Node, nn.Module | None]] = []
    last, channels = source.name, source.channels

    def put(label: str, op: Any, channels: int, size: tuple[int, ...] = (), layer: nn.Module | None = None) -> str:
        parts.append((Node(f"{at}.{label}", op, (last,), (stage,) * channels, size), layer))
        return f"{at}.{label}"

    image = value.dim() == 4 and not channels_last(value)
    if image:
        if head == "conv":
            size = source.size
            for number in (1, 2):
                last = put(f"norm{number}", BatchNorm(), channels, size)
                last = put(f"relu{number}", Map("relu"), channels, size)
                size, channels = tuple((side + 1) // 2 for side in size), width
                last = put(f"conv{number}", Conv((3, 3), (2, 2), (1, 1)), channels, size)
            last = put("norm3", BatchNorm(), channels, size)
            last = put("relu3", Map("relu"), channels, size)
        last = put("pool", Mean(), channels)
    elif value.dim() > 2:  # tokens, or an image with its channels last
        channels = value.shape[-1]
        pool = Call(torch.mean, 0, (None, tuple(range(1, value.dim() - 1))), {})
        last = put("pool", Opaque(), channels, (), pool)
    last = put("norm", BatchNorm(), channels)
    put("linear", Linear(bias=True), classes)
    return parts


def channels_last(value: Tensor) -> bool:
    """Whether the first two of three sides are an image's: of a square image they are the equal ones."""
    _, first, second, third = value.shape
    return first == second != third


# --- the proof --------------------------------------------------------------------------------------------------------


def prove(module: nn.Module, net: Extended, shape: Shape, name: str) -> None:
    """The last answer is the module's own, for two batch sizes, and an image's does not depend on the others; else raise."""
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return
    modes = {layer: layer.training for layer in module.modules()}
    first = next(module.parameters(), torch.zeros(0))
    net.eval()
    try:
        module.eval()
        with torch.no_grad():
            images = torch.randn(max(BATCHES), *shape, generator=torch.Generator().manual_seed(0)).to(first)
            answers = []
            for batch in BATCHES:
                mine, theirs = net(images[:batch])[-1], module(images[:batch])
                answers.append(mine)
                if alike(mine, theirs, 1e-5):
                    continue
                if not alike(module(images[:batch]), theirs, 1e-5):
                    raise NestlingError(
                        f"{name}: cannot give it exits: in evaluation, it answers the same images otherwise each time (dropout "
                        "that is always on, other random numbers, a count of its calls). Turn that off there: F.dropout(..., "
                        "training=self.training)"
                    )
                raise NestlingError(
                    f"{name}: it was not read right: for {batch} images its last answer is not the module's. Contexts inside it, "
                    "such as torch.autocast, are not seen: put them around it. Anything else is a fault of nestling's."
                )
            least = min(BATCHES)
            if not alike(answers[1][:least], answers[0][:least], max(1e-3, 100 * torch.finfo(first.dtype).eps)):
                raise NestlingError(
                    f"{name}: cannot give it exits: its answer for an image depends on the other images of the batch, or on how "
                    "many there are (a mean over the batch, x.size(0), batch norm without running statistics)"
                )
    finally:
        for layer, mode in modes.items():
            layer.training = mode


def alike(one: Tensor, other: Tensor, share: float) -> bool:
    limit = share * float(other.nan_to_num().abs().max())
    return one.shape == other.shape and torch.allclose(one, other, rtol=0.0, atol=limit, equal_nan=True)
