"""A nested network as data: its plan, and torch's own layers in it, so that it is built again without anybody's code.

In: a network. Out: its account, of what JSON holds; or why there is none, as where a layer is of somebody's own class. And back:
from an account the network without weights. What an account names is looked up in lists of layers and functions of tensors and
nowhere else, so it can make no other thing run.
"""

import copy
import operator
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from itertools import groupby
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import get_overridable_functions, resolve_name

from nestling.errors import NestlingError
from nestling.nets.extended import Extended
from nestling.nets.net import NestedNet
from nestling.nets.ops import OPS, Computed, Scale, calls
from nestling.nets.ops.layernorm import Alike
from nestling.nets.ops.weighted_op import WeightedOp
from nestling.nets.plan import Node, Plan
from nestling.nets.reading import recorded
from nestling.nets.reading.vocabulary import BINARY
from nestling.nets.reading.watcher import put_at
from nestling.nets.settle import check

FORMAT = 1
PIECES = (recorded.Read, recorded.Made, recorded.Held, recorded.PerImage, recorded.Copy)
RECORDS: dict[str, Any] = {kind.__name__: kind for kind in (*OPS.values(), Alike, *PIECES)}
LAYERS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (
        calls.Call,
        calls.DropPath,
        calls.Reshape,
        calls.Windows,
        calls.Repeat,
        calls.Patches,
        recorded.Recorded,
    )
}
ARITHMETIC = (
    "abs add eq floordiv ge getitem gt iadd imul invert isub itruediv le lt matmul mod mul ne neg pow sub truediv"
)
KINDS = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype | torch.memory_format)}
NOT_TOLD = {"training", "borrowed"}
NOT_OF_TENSORS = (
    "apply_ backward const_data_ptr data_ptr map2_ map_ module_load numpy pin_memory register_hook "
    "register_post_accumulate_grad_hook resize resize_ resize_as resize_as_ set_ share_memory_ storage storage_type "
    "untyped_storage"
)  # in torch's list, but they call functions, give away memory or take what was not computed
CHANNELS, PAIRS = 2**23, 2**33  # of all nodes, and of channels with those they read: what a plan takes to be checked
ShapesOfWeights = Mapping[str, tuple[int, ...]]


class Untold(Exception):
    """Why a network has no account."""


def account(net: NestedNet) -> dict[str, Any]:
    """The network as data, proved: what is built of it has the same plan and, with the same weights, the same answers bit for
    bit. Where it cannot be told, `missing` says why."""
    try:
        told = {"format": FORMAT, **network(net)}
        prove(net, told)
    except Exception as error:  # whatever is in somebody's network: it can still be built by its function
        why = str(error) if isinstance(error, Untold) else f"{type(error).__name__}: {error}"
        return {"format": FORMAT, "missing": why}
    return told


def rebuilt(told: Any, weights: ShapesOfWeights | None = None) -> NestedNet:
    """The network of an account, in evaluation. Its weights are still to be loaded; `weights` are the shapes of those that lie
    beside an account from elsewhere, which cannot be that of a larger network."""
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        found = told.get("format") if isinstance(told, dict) else told
        raise NestlingError(f"found an account of a network of format {found!r:.40}; expected {FORMAT}")
    try:
        plan = plan_made(told, weights)
        if weights is not None:
            with torch.device("meta"):
                shapes = {key: tuple(t.shape) for key, t in made_again(told, plan).state_dict().items()}
            if odd := sorted(key for key in shapes.keys() | weights.keys() if shapes.get(key) != weights.get(key)):
                found = f"{odd[0]} has shape {weights.get(odd[0], 'none')}, here {shapes.get(odd[0], 'none')}"
                raise NestlingError(f"the weights beside it are of another network: {found}")
        return made_again(told, plan).eval()
    except Exception as error:  # whatever a spoilt file leads to
        raise NestlingError(
            f"this account of a network is damaged, or of another version of torch ({type(error).__name__}: {error}). Name the "
            "function that builds the network, or train again"
        ) from error


def network(net: NestedNet) -> dict[str, Any]:
    plan = net.plan
    if type(net) not in (NestedNet, Extended):
        raise Untold(f"it is a {type(net).__name__}")
    layers, kinds = {}, {}
    paths = {id(module): path for path, module in net.named_modules()}
    for node in plan.nodes:
        if not node.op.layered or node.shares:
            continue
        layer = net.layer(node.name)
        if node.op.given:
            layers[node.name] = layer_told(node.name, layer, paths)
        else:
            own = node.op.layer(node, plan.reads_of(node))
            if type(own) is not type(layer):
                raise Untold(f"{node.name} has been replaced by a {type(layer).__name__}")
            kinds[node.name] = value_told(next(own_tensors(layer), torch.zeros(0)).dtype)
    first: dict[int, str] = {}
    named = dict(net.named_parameters(remove_duplicate=False))
    told: dict[str, Any] = {
        "plan": {word: value_told(getattr(plan, word)) for word in ("name", "heads", "sizes", "answering")},
        "nodes": [node_told(node) for node in plan.nodes],
        "layers": layers,
        "types": kinds,
        "tied": {name: first[id(p)] for name, p in named.items() if first.setdefault(id(p), name) != name},
        "frozen": [name for name, p in named.items() if not p.requires_grad],
    }
    if isinstance(net, Extended) and net._held:
        told["own"] = [list(net._own), list(net._readers), list(net._copied)]
    return told


def plan_made(told: dict[str, Any], weights: ShapesOfWeights | None) -> Plan:
    """Counted before anything is made of it: a few words may ask for more than any machine has."""
    channels: dict[str, int] = {}
    total = pairs = 0
    for name, _, reads, births, *_ in told["nodes"]:
        channels[name] = sum(count for _, count in births)
        total += channels[name]
        pairs += channels[name] * (1 + sum(channels[read] for read in reads))
        if not all(count > 0 for _, count in births) or total > CHANNELS or pairs > PAIRS:
            raise NestlingError(f"up to {name} it has {total:,} channels, {pairs:,} with what they read")
    words = {word: value_made(told["plan"][word]) for word in ("name", "heads", "sizes", "answering")}
    plan = Plan(nodes=tuple(map(node_made, told["nodes"])), **words)
    for node in plan.nodes:
        if isinstance(node.op, Scale | Computed) and node.op.function not in BINARY.values():
            raise NestlingError(f"{node.name} is {node.op.function!r:.40}, which is no arithmetic")
    if weights is not None:
        held = sum(map(prod, weights.values()))
        for node in plan.nodes:
            if isinstance(node.op, WeightedOp) and not node.shares:
                held -= node.channels * (channels[node.reads[0]] // node.op.groups)
        if held < 0:
            raise NestlingError("it has more weights than lie beside it")
    return check(plan)


def made_again(told: dict[str, Any], plan: Plan) -> NestedNet:
    borrowers: list[tuple[Any, dict[str, list[str]]]] = []
    given = {name: layer_made(layer, borrowers) for name, layer in told["layers"].items()}
    net = (Extended if "own" in told else NestedNet)(plan, given)
    for name, kind in told["types"].items():
        for tensor in own_tensors(net.layer(name)):
            tensor.data = tensor.data.to(value_made(kind)) if tensor.is_floating_point() else tensor.data
    for piece, borrowed in borrowers:
        piece.borrowed = {name: ([net.get_submodule(path)], theirs) for name, (path, theirs) in borrowed.items()}
        check_steps(plan.name, piece)
    for name, first in told["tied"].items():
        path, _, last = name.rpartition(".")
        net.get_submodule(path)._parameters[last] = net.get_parameter(first)
    if isinstance(net, Extended):
        own, readers, copied = told["own"]
        net.hold(own, readers)._copied = tuple(copied)
    for name in told["frozen"]:
        net.get_parameter(name).requires_grad_(False)
    return net


def own_tensors(layer: Any) -> Iterator[Tensor]:
    """A layer's own tensors of its number type, without those of layers that hang below it by name."""
    tensors = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
    return (tensor for tensor in tensors if tensor.is_floating_point())


def prove(net: NestedNet, told: dict[str, Any]) -> None:
    """As it stands after this call: what a folder gives must be what was trained."""
    if why := difference(net, rebuilt(told)):
        raise Untold(why)


def difference(net: NestedNet, again: NestedNet) -> str:
    """What a network that was built of an account does otherwise, with the other's weights, on noise, on the CPU; "": nothing."""
    mine = copy.deepcopy(net).cpu().eval()
    state = mine.state_dict()
    if again.plan != mine.plan or {k: v.shape for k, v in again.state_dict().items()} != {
        k: v.shape for k, v in state.items()
    }:
        return "its plan or its weights cannot be told as data"
    again.load_state_dict(state)
    first = next((p for p in mine.parameters() if p.is_floating_point()), torch.zeros(0))
    noise = torch.randn(2, *mine.plan.input.shape(mine.plan.input.channels), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        both = (again(noise.to(first)), mine(noise.to(first)))
    if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) and a.dtype == b.dtype for a, b in zip(*both, strict=True)):
        return "built again it would answer otherwise"
    return ""


# --- nodes ------------------------------------------------------------------------------------------------------------


def node_told(node: Node) -> list[Any]:
    """Births as runs of equal ones."""
    births = [[birth, len(list(run))] for birth, run in groupby(node.births)]
    return [node.name, value_told(node.op), list(node.reads), births, list(node.size), node.shares]


def node_made(told: list[Any]) -> Node:
    name, op, reads, births, size, shares = told
    return Node(
        name, value_made(op), tuple(reads), tuple(b for b, count in births for _ in range(count)), tuple(size), shares
    )


# --- layers that torch or the user handed over ------------------------------------------------------------------------


def layer_told(name: str, layer: nn.Module, paths: dict[int, str]) -> dict[str, Any]:
    kind = type(layer)
    if layer_kinds().get(kind.__name__) is not kind:
        raise Untold(f"{name} is a {kind.__name__}, a layer of your own")
    internal = vars(nn.Module()).keys() | NOT_TOLD
    try:
        told: dict[str, Any] = {
            "is": kind.__name__,
            "with": {word: value_told(value) for word, value in vars(layer).items() if word not in internal},
        }
    except Untold as error:
        raise Untold(f"{name} ({kind.__name__}) has {error}") from None
    check_steps(name, layer)
    if layer._non_persistent_buffers_set:
        raise Untold(f"{name} ({kind.__name__}) has buffers that are not among its weights")
    for word, held in (("parameters", layer._parameters), ("buffers", layer._buffers)):
        if held:
            told[word] = {key: None if t is None else [list(t.shape), value_told(t.dtype)] for key, t in held.items()}
    if layer._modules:
        told["layers"] = {
            k: None if m is None else layer_told(f"{name}.{k}", m, paths) for k, m in layer._modules.items()
        }
    if isinstance(layer, recorded.Recorded) and layer.borrowed:
        told["borrowed"] = {key: [paths[id(lender)], theirs] for key, ([lender], theirs) in layer.borrowed.items()}
    return told


def layer_made(told: dict[str, Any], borrowers: list[tuple[Any, dict[str, list[str]]]]) -> nn.Module:
    kind = layer_kinds()[told["is"]]
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    internal = vars(nn.Module()).keys()
    layer.__dict__.update({word: value_made(value) for word, value in told["with"].items() if word not in internal})
    for key, held in told.get("parameters", {}).items():
        shape, dtype = held or ([], {"kind": "torch.float32"})
        made = nn.Parameter(torch.zeros(tuple(shape), dtype=value_made(dtype)))
        layer.register_parameter(key, made if held else None)
    for key, held in told.get("buffers", {}).items():
        layer.register_buffer(key, torch.zeros(tuple(held[0]), dtype=value_made(held[1])) if held else None)
    for key, below in told.get("layers", {}).items():
        layer.add_module(key, layer_made(below, borrowers) if below else None)
    if isinstance(layer, recorded.Recorded):
        layer.borrowed = {}
        borrowers.append((layer, told.get("borrowed", {})))
    return layer


@cache
def layer_kinds() -> dict[str, type[nn.Module]]:
    known = {**vars(nn.modules.linear), **vars(nn)}.values()
    torchs = {kind.__name__: kind for kind in known if isinstance(kind, type) and issubclass(kind, nn.Module)}
    return torchs | LAYERS


# --- values -----------------------------------------------------------------------------------------------------------


def value_told(value: Any) -> Any:
    """A tuple is a list, everything that JSON has no word for an object of one key."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else {"float": str(value)}
    if isinstance(value, list):
        return {"list": [value_told(each) for each in value]}
    if isinstance(value, tuple) and type(value) in (tuple, torch.Size):
        return [value_told(each) for each in value]
    if isinstance(value, dict):
        return {"dict": [[value_told(key), value_told(each)] for key, each in value.items()]}
    if isinstance(value, slice):
        return {"slice": [value_told(each) for each in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"rest": True}
    if isinstance(value, torch.dtype | torch.memory_format):
        return {"kind": str(value)}
    if isinstance(value, torch.device):
        return {"device": value.type}  # where the tensors are is found when it runs
    if RECORDS.get(type(value).__name__) is type(value):
        return {type(value).__name__: {f.name: value_told(getattr(value, f.name)) for f in fields(value)}}
    if callable(value) and functions().get(name := name_of(value)) is value:
        return {"function": name}
    raise Untold(f"{'a function' if callable(value) else 'a value'} that cannot be told as data: {value!r:.60}")


def value_made(told: Any) -> Any:
    if isinstance(told, list):
        return tuple(map(value_made, told))
    if not isinstance(told, dict):
        return told
    [(word, held)] = told.items()
    if word in RECORDS:
        return RECORDS[word](**{name: value_made(value) for name, value in held.items()})
    return MADE[word](held)


@cache
def functions() -> dict[str, Any]:
    """The functions that compute something of tensors, by name: torch's own list of them, and Python's operators."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about functions that are deprecated
        listed = [each for several in get_overridable_functions().values() for each in several]
        found = {resolve_name(each): each for each in listed}
    found |= {f"operator.{word}": getattr(operator, word) for word in ARITHMETIC.split()}
    found |= {f"torch.{each.__name__}": each for each in (torch.arange, torch.full, torch.ones, torch.zeros)}
    found |= {f"nestling.{each.__name__}": each for each in (calls.mask, calls.largest, calls.smallest, put_at)}
    out = {*NOT_OF_TENSORS.split()}
    last = {name: name.rpartition(".")[2] for name in found if name}
    return {name: found[name] for name, word in last.items() if not word.startswith("_") and word not in out}


def name_of(function: Any) -> str:
    return names().get(id(function), "")


@cache
def names() -> dict[int, str]:
    return {id(function): name for name, function in functions().items()}


def check_steps(name: str, layer: nn.Module) -> None:
    """What was recorded calls functions of tensors, by name also as methods, and holds tensors and layers: nothing else of the
    objects that it meets."""
    if not isinstance(layer, recorded.Recorded):
        return
    for key, ([lender], theirs) in layer.borrowed.items():
        if theirs not in holds(lender):
            raise Untold(f"{name} borrows {key}, which is no tensor and no layer")
    for op, target, args, kwargs in layer.steps:
        known = (op == "call_function" and name_of(target)) or (op == "call_module" and target in holds(layer))
        if not known and (op != "call_method" or f"torch.Tensor.{target}" not in functions()):
            raise Untold(f"{name} calls {calls.spelled(target)}, which is no function of tensors")
        if strange := next((each for each in held_by((args, kwargs)) if each not in holds(layer)), None):
            raise Untold(f"{name} holds {strange!r:.40}, which is no tensor and no layer")


def holds(layer: Any) -> set[str]:
    return {*layer._parameters, *layer._buffers, *layer._modules, *getattr(layer, "borrowed", ())}


def held_by(value: Any) -> Iterator[str]:
    """The names of what an argument holds."""
    if isinstance(value, recorded.Held):
        yield value.name
    parts: Any = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else ()
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
    for part in (value.of,) if isinstance(value, recorded.Copy) else parts:
        yield from held_by(part)


MADE: dict[str, Any] = {
    "float": float,
    "list": lambda held: list(map(value_made, held)),
    "dict": lambda held: {value_made(key): value_made(value) for key, value in held},
    "slice": lambda held: slice(*map(value_made, held)),
    "rest": lambda held: Ellipsis,
    "kind": KINDS.__getitem__,
    "device": torch.device,
    "function": lambda held: functions()[held],
}
