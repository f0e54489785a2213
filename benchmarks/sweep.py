"""Other people's networks made anytime: the smallest model of every family of timm, torchvision and pytorchcv, in three ways.

    python benchmarks/sweep.py                            a table, and results/sweep.csv; rows that are there are kept
    python benchmarks/sweep.py --list                     which families there are: results/sweep-families.csv
    python benchmarks/sweep.py --only resnet              models whose name holds the text; no file is written
    python benchmarks/sweep.py --again dpn68,fishnet99    these models once more; all: all but rows of this very commit;
                                                          missing: those without a row; failed: those with a way that is not ok
    python benchmarks/sweep.py --workers 8 --minutes 30   eight models at a time; stop after so long; call it again to go on
    python benchmarks/sweep.py --rows FILE                rows are written there instead; called again, it goes on there
    python benchmarks/sweep.py --merge FILE               put the rows of such a file into results/sweep.csv
    python benchmarks/sweep.py --read                     whether those without a row are read; seconds each, no file is written
    python benchmarks/sweep.py --table                    the rows so far as docs/log/nest.md tells them

Random weights, batch 2, float32, small images where the model takes them. Each way that nests a model is then held to everything:
last answer against the module (keep, exits), stages against the whole, NaN in all that is born later, multiply-accumulates as
torch counts them, one step of OSGD, export and Runtime. Whatever libraries are installed are listed; no weights are fetched.
"""

import argparse
import copy
import csv
import importlib.metadata
import importlib.util
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import nestling
from nestling.errors import NestlingError
from nestling.files import write_atomically
from nestling.nets.net import NestedNet
from nestling.nets.reading.baked import baked
from nestling.nets.reading.read import read, read_whole

WAYS: dict[str, Callable[..., NestedNet]] = {
    "exits": lambda module, shape: nestling.exits(module, (0.3, 0.6), shape),
    "stripes": lambda module, shape: nestling.nest(module, "w,w", shape, uneven=True),
    "keep": lambda module, shape: nestling.keep(module, (1 / 4, 1 / 4), shape, proof=False),  # stripes has proved it
}
LARGEST = 140_000_000  # parameters
# words of small models, which are looked at first
SMALL = ("tiny", "atto", "xxs", "nano", "pico", "femto", "mini", "small", "_xs", "_s", "_t", "_b0", "18", "20", "_w")
# of pytorchcv: other data sets, and other tasks than one class for each picture
NO_IMAGENET_NOR_CIFAR: tuple[str, ...] = (
    "_cifar100",
    "_svhn",
    "_cub",
    "_coco",
    "_voc",
    "_ade20k",
    "_cityscapes",
    "_celebamaskhq",
    "_widerface",
)
NO_IMAGENET_NOR_CIFAR += ("nvpattexp", "voca", "superpointnet", "pfpcnet", "prnet", "jasper", "quartznet", "openpose")
RESULTS = Path(__file__).parent.parent / "results"
FILE, FAMILIES = RESULTS / "sweep.csv", RESULTS / "sweep-families.csv"
COLUMNS = ["library", "family", "model", "kind", "image", "params", *WAYS, *(f"why_{way}" for way in WAYS), "seconds"]
COLUMNS += ["commit", "torch"]
KINDS = ("conv", "transformer")
Make = Callable[[], nn.Module]
LISTED = ["library", "version", "family", "model", "params", "kind"]


# --- which models -----------------------------------------------------------------------------------------------------


def libraries() -> Iterator[tuple[str, dict[str, Make], Callable[[str], str]]]:
    """Every installed library: its name, its models, and the family of each."""
    if importlib.util.find_spec("torchvision"):
        without_operators()
        import torchvision

        names = torchvision.models.list_models(module=torchvision.models)
        build = torchvision.models.get_model_builder
        made: dict[str, Make] = {n: partial(torchvision.models.get_model, n, weights=None) for n in names}
        yield "torchvision", made, lambda name: build(name).__module__.rpartition(".")[2]
    if importlib.util.find_spec("timm"):
        import timm

        family = {n: m for m in timm.list_modules() for n in timm.list_models(module=m) if not n.startswith("test_")}
        classes = {n: timm.models.get_pretrained_cfg(n) for n in family}
        without = {n for n, config in classes.items() if config is not None and config.num_classes == 0}
        given = {n: {"num_classes": 1000} if n in without else {} for n in family}  # features only: with a classifier
        made = {n: partial(timm.create_model, n, pretrained=False, **given[n]) for n in family}
        yield "timm", made, family.__getitem__
    if importlib.util.find_spec("pytorchcv"):
        from pytorchcv import model_provider

        found = {
            n: m for n, m in model_provider._models.items() if not any(other in n for other in NO_IMAGENET_NOR_CIFAR)
        }
        made = {n: partial(m, pretrained=False) for n, m in found.items()}
        yield "pytorchcv", made, lambda name: found[name].__module__.rpartition(".")[2]


def without_operators() -> None:
    """torchvision built for another torch has no operators of its own, which classification does not use."""
    try:
        import torchvision  # noqa: F401
    except (RuntimeError, ImportError):
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")


def smallest(made: dict[str, Make], family: Callable[[str], str]) -> Iterator[tuple[str, str, int]]:
    """Of every family the model with the fewest parameters that a classifier of one image can be: family, model, parameters."""
    names: dict[str, list[str]] = {}
    for name in made:
        names.setdefault(family(name), []).append(name)
    for kind in sorted(names):
        best = (LARGEST, "")
        for name in sorted(names[kind], key=lambda name: (not any(word in name for word in SMALL), name)):
            size = parameters(made[name], 2 * best[0])
            best = best if size is None else min(best, (size, name))
        if best[1]:
            yield kind, best[1], best[0]


def parameters(make: Make, most: int) -> int | None:
    """How many parameters a model has; None if that are more than `most`, or if it does not build without data."""
    seen = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal seen
        seen += parameter.numel()
        if seen > most:
            raise OverflowError

    hook = register_module_parameter_registration_hook(count)
    try:
        for place in ("meta", "cpu"):  # some compute with tensors while they are built
            try:
                with torch.device(place):
                    return sum(p.numel() for p in make().parameters())
            except OverflowError:
                return None
            except Exception:  # another of the family may build
                seen = 0
    finally:
        hook.remove()
    return None


# --- one model --------------------------------------------------------------------------------------------------------


def examine(make: Make, send: Any, known: dict[str, Any] | None = None) -> None:
    """Send facts about one model as they are found: the row so far, however it ends. What is known is not tried again."""
    torch.manual_seed(0)
    module = make()
    try:
        x = images(module)
    except Exception as error:
        send({f"why_{way}": f"takes no images: {first_line(error)}" for way in WAYS})
        return
    row: dict[str, Any] = {"kind": kind_of(module, x), "image": "x".join(map(str, x.shape[1:])), **(known or {})}
    send(row)
    for way, nested in WAYS.items():
        if way in row:
            continue
        if way == "keep" and row.get("stripes") == "refused":
            row |= {"keep": "refused", "why_keep": row["why_stripes"]}
        else:
            row |= outcome(way, lambda nested=nested: nested(module, tuple(x.shape[1:])), module, x)  # type: ignore[misc]
        send(row)


def outcome(way: str, nested: Callable[[], NestedNet], module: nn.Module, x: Tensor) -> dict[str, str]:
    try:
        net = nested()
    except NestlingError as refusal:
        return {way: "refused", f"why_{way}": first_line(refusal)}
    except Exception as error:
        return {way: "broken", f"why_{way}": f"nesting it: {type(error).__name__}: {first_line(error)}"}
    try:
        check(net, module, x, own_answer=way != "stripes")
    except Exception as error:
        return {way: "broken", f"why_{way}": f"{type(error).__name__}: {first_line(error)}"}
    return {way: "ok"}


def kind_of(module: nn.Module, x: Tensor) -> str:
    """A transformer multiplies tensors by each other, as attention does, or has norms over channels."""
    normed = any(
        word in type(layer).__name__
        for layer in module.modules()
        for word in ("LayerNorm", "RmsNorm", "RMSNorm", "SimpleNorm")
    )
    with torch.no_grad(), Products() as seen:
        module.eval()(x)
    return "transformer" if normed or seen.found else "conv"


class Products(TorchFunctionMode):
    """Whether something is multiplied that is no layer."""

    words = ("scaled_dot_product_attention", "multi_head_attention_forward", "matmul", "__matmul__", "bmm", "einsum")
    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= getattr(func, "__name__", "") in self.words
        return func(*args, **(kwargs or {}))


def images_like(module: nn.Module) -> list[tuple[int, int, int]]:
    """Shapes of images that a model may take, the smallest first and its own among the last."""
    config = getattr(module, "default_cfg", None) or {}
    channels, *_, own = config.get("input_size", (3, *[getattr(module, "in_size", (224, 224))[0]] * 2))
    sides = dict.fromkeys((32 if own <= 32 else 64, 96, 128, own, max(own, 299)))
    return [(channels, side, side) for side in sides]


def images(module: nn.Module) -> Tensor:
    """A batch as small as the model takes."""
    shapes = images_like(module)
    for shape in shapes:
        x = torch.randn(2, *shape)
        try:
            with torch.no_grad():
                module.train()(torch.cat([x, x]))  # auxiliary heads may need larger images; norms have seen something
                found = module.eval()(x)
            if isinstance(found, Tensor) and torch.isfinite(found).all():
                return x
        except Exception:
            if shape == shapes[-1]:
                raise
    raise ValueError("it gives no finite logits")


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def check(net: NestedNet, module: nn.Module, x: Tensor, own_answer: bool) -> None:
    """Everything that is promised of a nested network; AssertionError says what does not hold."""
    net.eval()
    with torch.no_grad():
        whole, staged = net(x), [answer.clone() for answer in net.answers(x)]
        if own_answer:
            assert own_in_the_end(net, module, x, whole[-1]), "the last answer is not the module's"
        for mine, theirs in zip(whole, staged, strict=True):
            assert near(mine, theirs, 1e-3), "stages and whole differ"
        check_work(net, x)
        check_leaks(net, x, staged)
    with tempfile.TemporaryDirectory() as folder:
        shape, classes = tuple(x.shape[1:]), tuple(map(str, range(whole[0].shape[1])))
        spec = nestling.Spec("it", shape, classes, net.sizes, mean=(0.5,) * shape[0], std=(0.5,) * shape[0])
        nestling.export_net(net, spec, f"{folder}/it", x)  # which verifies what it wrote
        with nestling.Runtime(f"{folder}/it", "cpu") as runtime:
            picture = (torch.rand(x.shape[1:]) * 255).to(torch.uint8)
            answer = runtime.answer(picture, deadline=None)
            assert answer.stage == len(staged), "the runtime did not get to the last stage"
    learnt = [p for p in net.train().parameters() if p.requires_grad]
    steps = torch.optim.SGD(learnt, 1e-4)
    losses = [F.cross_entropy(answer, torch.arange(len(x)) % answer.shape[1]) for answer in net(x)]
    nestling.backward(losses, net, nestling.OSGD())
    steps.step()
    assert all(bool(torch.isfinite(p).all()) for p in learnt), "a step of OSGD left something that is no number"


def near(one: Tensor, other: Tensor, share: float) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= share * other.abs().max().clamp(min=1e-6))


def own_in_the_end(net: NestedNet, module: nn.Module, x: Tensor, last: Tensor) -> bool:
    """Whether the last answer is the module's; where rounding in float32 may hide that, in float64."""
    if near(last, module(x), 1e-5):
        return True
    net, module = copy.deepcopy(net).double(), copy.deepcopy(module).double()
    return near(net(x.double())[-1], module(x.double()), 1e-9)


def check_work(net: NestedNet, x: Tensor) -> None:
    """Torch's own counter (2 per multiply-accumulate) sees the planned work in every stage.

    It does not know the fused attention and LSTMs of CPUs, and counts nothing there: they run in their plain forms."""
    fast = torch.backends.mha.get_fastpath_enabled()  # of nn.MultiheadAttention, which rounds otherwise
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        check_stages_work(net, x)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def check_stages_work(net: NestedNet, x: Tensor) -> None:
    state: tuple[Tensor, ...] = (x[:1],)
    for number, stage in enumerate(net.stages, start=1):
        with warnings.catch_warnings(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("ignore")  # of switching it off
            with torch.backends.mkldnn.flags(enabled=False):
                _, state = stage(state)
        found, planned = counter.get_total_flops() / 2, net.plan.new_macs(number)
        assert abs(found - planned) <= 0.01 * planned, f"stage {number} does {found:.0f} MACs, planned were {planned}"


def check_leaks(net: NestedNet, x: Tensor, staged: list[Tensor]) -> None:
    """NaN in every entry that task s does not own leaves its answer the same."""
    owners = net.owners()
    kept = {key: parameter.detach().clone() for key, parameter in net.named_parameters()}
    for task in range(len(staged) - 1):
        for key, parameter in net.named_parameters():
            foreign = (owners[key] >> task & 1 == 0).expand_as(parameter)
            parameter.data = torch.where(foreign, torch.full_like(parameter, float("nan")), kept[key])
        for number, answer in zip(range(task + 1), net.answers(x), strict=False):
            assert number < task or torch.equal(answer, staged[task]), f"stage {task + 1} depends on later weights"
    for key, parameter in net.named_parameters():
        parameter.data = kept[key]


def only_read(make: Make, send: Any) -> None:
    """Whether a model is read for exits and for stripes, on the smallest images it takes; nothing is computed."""
    module, found = make(), dict[str, str]()
    for shape in images_like(module):
        for way, reads in (("exits", read_whole), ("stripes", read)):
            try:
                reads(baked(module, "it")[0], shape, "it")
                found[way] = "read"
            except NestlingError as refusal:
                found[way] = found.get(way, "") if found.get(way) == "read" else first_line(refusal)
        if not any("does not run on images" in why for why in found.values()):
            break
    send(found)


# --- all of them ------------------------------------------------------------------------------------------------------


@dataclass
class Apart:
    """One model that a process of its own is at, so that one that takes too long or too much memory ends alone."""

    each: dict[str, Any]  # the family's line in the list
    process: Any
    facts_from: Connection
    start: float
    heard: float  # when it last said something: a way is finished, or the model is made
    facts: dict[str, Any] = field(default_factory=dict)
    killed: str = ""

    @classmethod
    def begin(cls, each: dict[str, Any], make: Make, examine: Callable[..., None]) -> "Apart":
        here, there = multiprocessing.Pipe(duplex=False)
        if each.get("known"):
            examine = partial(examine, known=each["known"])
        process = multiprocessing.get_context("fork").Process(
            target=alone, args=(make, examine, there.send), daemon=True
        )
        process.start()
        there.close()  # before another process inherits it: so the end of this one is seen
        return cls(each, process, here, time.monotonic(), time.monotonic())

    def ended(self, most: float) -> bool:
        """Take what it has to say; one that has said nothing for `most` seconds is stopped."""
        try:
            while self.facts_from.poll():
                self.facts, self.heard = self.facts_from.recv(), time.monotonic()
        except EOFError:
            self.process.join()
            return True
        if time.monotonic() > self.heard + most:
            self.killed = f"not done in {most:g} seconds"
            self.stop()
        return bool(self.killed)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()

    def row(self) -> dict[str, Any]:
        why = self.killed or f"ended by signal or exit {self.process.exitcode}"
        missing = {way: "unfinished" for way in WAYS if way not in self.facts}
        return {**self.facts, **missing, **{f"why_{way}": self.facts.get(f"why_{way}", why) for way in missing}}


def alone(make: Make, examine: Callable[..., None], send: Any) -> None:
    """In the process of one model: signals end it at once, and nothing but its facts is of interest."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that asked for it stops it
    torch.set_num_threads(1)
    examine(make, send)


def apart(
    todo: Iterable[dict[str, Any]],
    builders: dict[str, dict[str, Make]],
    examine: Callable[..., None],
    workers: int = 1,
    most: float = 600,
    until: float = float("inf"),
) -> Iterator[Apart]:
    """Models examined by `workers` processes at a time, each as it ends.

    Those not done at `until` are stopped; one that has finished no way is left out."""
    waiting, at_work = iter(todo), list[Apart]()
    try:
        while time.monotonic() < until:
            while len(at_work) < workers and (each := next(waiting, None)) is not None:
                at_work.append(Apart.begin(each, builders[each["library"]][each["model"]], examine))
            if not at_work:
                return
            wait([one.facts_from for one in at_work], timeout=1)
            for one in [one for one in at_work if one.ended(most)]:
                at_work.remove(one)
                yield one
        for one in at_work:
            one.killed = "not done when time was up"
            one.stop()
            if any(way in one.facts for way in WAYS):
                yield one
    finally:
        for one in at_work:
            one.stop()


def rows_of(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [dict(row) for row in csv.DictReader(file)]


def write(rows: list[dict[str, Any]], path: Path = FILE, columns: list[str] = COLUMNS) -> None:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(sorted(rows, key=lambda row: key(dict(row))))
    write_atomically(path, file.getvalue().encode())


def commit() -> str:
    """Which code ran, as git knows it; a plus says that files were changed since. Empty where there is no git."""
    git = ["git", "-C", str(RESULTS.parent)]
    try:
        number = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "src", "benchmarks/sweep.py"]).returncode
    except FileNotFoundError:
        return ""
    return number + "+" * bool(number and changed)


def list_families() -> None:
    """The smallest model of every family, with its kind, written as they are found."""
    rows: list[dict[str, Any]] = []
    for library, made, family in libraries():
        version = importlib.metadata.version(library)
        for name, model, params in smallest(made, family):
            each = dict(zip(LISTED, (library, version, name, model, params, ""), strict=True))
            [one] = apart([each], {library: made}, kind_alone)
            rows.append({**each, "kind": one.facts.get("kind", "")})
            print(*rows[-1].values(), flush=True)
            write(rows, FAMILIES, LISTED)


def kind_alone(make: Make, send: Any) -> None:
    """The kind of one model, without data where it runs so."""
    try:
        with torch.device("meta"):
            module = make()
            shapes = images_like(module)
            send({"kind": kind_of(module, torch.empty(2, *shapes[-2 if len(shapes) > 1 else 0]))})
    except Exception:
        torch.manual_seed(0)
        module = make()
        send({"kind": kind_of(module, images(module))})


def table(rows: list[dict[str, Any]], listed: list[dict[str, Any]], kind: str = "conv") -> str:
    """How many families of each library were made anytime in each way, and why the others were not."""
    lines = [f"| {kind} | families | run | {' | '.join(WAYS)} |", "|---" * (3 + len(WAYS)) + "|"]
    rows = [row for row in rows if row["kind"] == kind]
    listed = [row for row in listed if row["kind"] == kind]
    for library in [*sorted({row["library"] for row in listed}), ""]:
        mine = [row for row in rows if library in ("", row["library"])]
        all_of = sum(library in ("", row["library"]) for row in listed)
        made = " | ".join(str(sum(row[way] == "ok" for row in mine)) for way in WAYS)
        lines.append(f"| {library or 'all'} | {all_of} | {len(mine)} | {made} |")
    lines += ["", "| not made | way | because |", "|---|---|---|"]
    for row in rows:
        words: dict[str, list[str]] = {}
        for way in WAYS:
            if row[way] != "ok":
                words.setdefault(shortened(row[f"why_{way}"]), []).append(way)
        lines += [f"| {row['model']} | {', '.join(ways)} | {why} |" for why, ways in words.items()]
    missing = [row["model"] for row in listed if key(row) not in {key(each) for each in rows}]
    return "\n".join(lines) + f"\n\nNot run: {', '.join(missing) or 'none'}."


def key(row: dict[str, Any]) -> tuple[str, str]:
    return row["library"], row["family"]


def shortened(why: str, most: int = 160) -> str:
    """A reason without the network's name, as long as a table has room for."""
    why = why.partition(": cannot nest ")[2] or why
    return why if len(why) <= most else why[: most - 3].rpartition(" ")[0] + " ..."


def in_turn(
    listed: list[dict[str, Any]], rows: list[dict[str, Any]], again: list[str], code: str
) -> list[dict[str, Any]]:
    """What to examine, small ones first: families without a row, those that did not end well, then (`again`) rows of other code.

    A row that is there, and that nobody asks for again, is left alone unless it was not finished."""
    found = {key(row): row for row in rows}
    turns: list[tuple[int, int, dict[str, Any]]] = []
    for each in listed:
        row = found.get(key(each))
        ways = [row[way] for way in WAYS] if row else []
        if asked(each["model"], row, again, code) if again else row is None or "unfinished" in ways:
            bad = 1 if set(ways) & {"unfinished", "broken"} else 2
            turns.append((bad if row else 0, int(each["params"]), each))
    return [each for *_, each in sorted(turns, key=lambda turn: turn[:2])]


def asked(model: str, row: dict[str, Any] | None, again: list[str], code: str) -> bool:
    """Whether `again` asks for a family: by the name of its model, or by a word that fits its row."""
    if row is None:
        return bool({model, "missing", "all"} & set(again))
    failed = any(row[way] != "ok" for way in WAYS)
    return model in again or ("failed" in again and failed) or ("all" in again and row["commit"] != code)


def go_on(todo: list[dict[str, Any]], rows: list[dict[str, Any]], code: str) -> list[dict[str, Any]]:
    """What is left of it where `rows` of this code are there: families with an unfinished way, with what is known of them."""
    done = {key(row): row for row in rows if (row["commit"], row["torch"]) == (code, torch.__version__)}
    left = list[dict[str, Any]]()
    for each in todo:
        row = done.get(key(each))
        if row is None:
            left.append(each)
        elif "unfinished" in (row[way] for way in WAYS):
            over = [way for way in WAYS if row[way] != "unfinished"]
            left.append({**each, "known": {word: row[word] for way in over for word in (way, f"why_{way}")}})
    return left


def merged(rows: list[dict[str, Any]], later: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with later ones in their place; one that was not finished does not replace one that was."""
    found = {key(row): row for row in rows}
    for row in later:
        if key(row) not in found or "unfinished" not in (row[way] for way in WAYS):
            found[key(row)] = row
    return list(found.values())


def shown(one: Apart, code: str) -> dict[str, Any]:
    """The row of one family, which is shown too."""
    row = {word: one.each[word] for word in ("library", "family", "model", "params")}
    row |= {**one.row(), "seconds": round(time.monotonic() - one.start, 1), "commit": code, "torch": torch.__version__}
    row["kind"] = row.get("kind") or one.each["kind"]  # one that ended before it could say
    print(f"{row['library']:12}{row['model']:34}{'  '.join(f'{way} {row[way]}' for way in WAYS)}  {row['seconds']} s")
    print(*(f"    {way}: {row[f'why_{way}']}\n" for way in WAYS if row.get(f"why_{way}")), sep="", end="", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="only list the families")
    parser.add_argument("--only", default="", help="only models whose name holds this text; nothing is written")
    parser.add_argument(
        "--again",
        default="",
        help="these models, row or no row; missing: those without; failed: not ok in some way; all: of other commits",
    )
    parser.add_argument(
        "--large", action="store_true", help="large models first: all cores are done at about the same time"
    )
    parser.add_argument("--kind", default="", choices=("", *KINDS), help="only families of this kind")
    parser.add_argument("--workers", type=int, default=1, help="how many models at a time, one thread each")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many minutes")
    parser.add_argument("--seconds", type=float, default=600, help="the most that one model may take in one way")
    parser.add_argument("--file", type=Path, default=FILE, help="where rows are read from and written to")
    parser.add_argument("--rows", type=Path, help="write rows there instead, and go on with what is there")
    parser.add_argument("--merge", type=Path, help="only put the rows of this file into --file")
    parser.add_argument("--commit", default="", help="which code this is; without it, what git says")
    parser.add_argument("--read", action="store_true", help="only say whether they are read; nothing is written")
    parser.add_argument("--table", action="store_true", help="only show the rows that are there")
    options = parser.parse_args()
    if options.list or not FAMILIES.exists():
        list_families()
    listed = rows_of(FAMILIES)
    if options.table:
        print("\n\n".join(table(rows_of(options.file), listed, kind) for kind in KINDS))
    if options.merge:
        write(merged(rows_of(options.file), rows_of(options.merge)), options.file)
    if options.list or options.table or options.merge:
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which stops all that is at work
    for word in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[word] = "1"
    until, code = time.monotonic() + 60 * options.minutes, options.commit or commit()
    builders = {library: made for library, made, _ in libraries()}
    listed = [row for row in listed if options.only in row["model"] and options.kind in ("", row["kind"])]
    missing = [row["model"] for row in listed if row["model"] not in builders.get(row["library"], {})]
    listed = [row for row in listed if row["model"] not in missing]
    rows = [] if options.only else rows_of(options.file)
    todo = in_turn(listed, rows, options.again.split(",") if options.again else [], code)
    into: Path = options.rows or options.file
    todo = go_on(todo, rows_of(options.rows), code) if options.rows else todo
    todo = sorted(todo, key=lambda each: -int(each["params"])) if options.large else todo
    print(f"{len(todo)} models, {options.workers} at a time, torch {torch.__version__}, commit {code}", flush=True)
    print(*(["not installed:", ", ".join(missing)] if missing else []), flush=True)
    for one in apart(todo, builders, only_read if options.read else examine, options.workers, options.seconds, until):
        if options.read:
            print(one.each["library"], one.each["model"], one.facts or one.row(), flush=True)
            continue
        row = shown(one, code)
        if not options.only:
            write([*(other for other in rows_of(into) if key(other) != key(row)), row], into)


if __name__ == "__main__":
    main()
