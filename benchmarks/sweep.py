"""Other people's networks made anytime: the smallest model of every family of timm, torchvision and pytorchcv, in three ways.

    python benchmarks/sweep.py                            a table, and results/sweep.csv; rows that are there are kept
    python benchmarks/sweep.py --list                     which families there are: results/sweep-families.csv
    python benchmarks/sweep.py --only resnet              models whose name holds the text; no file is written
    python benchmarks/sweep.py --again dpn68,fishnet99    these models once more, whose rows are replaced
    python benchmarks/sweep.py --kind conv --minutes 30   one kind; stop after so long; call it again to go on
    python benchmarks/sweep.py --read                     whether those without a row are read; seconds each, no file is written
    python benchmarks/sweep.py --table                    the rows so far as docs/nest.md tells them

Random weights, batch 2, float32, small images where the model takes them. Each way that nests a model is then held to everything:
last answer against the module (keep, exits), stages against the whole, NaN in all that is born later, multiply-accumulates as
torch counts them, one step of OSGD, export and Runtime. Whatever libraries are installed are listed; no weights are fetched.
"""

import argparse
import csv
import importlib.metadata
import importlib.util
import multiprocessing
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
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
NO_IMAGENET_NOR_CIFAR = (
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
COLUMNS += ["commit"]
KINDS = ("conv", "transformer")
LISTED = ["library", "version", "family", "model", "params", "kind"]


# --- which models -----------------------------------------------------------------------------------------------------


def libraries() -> Iterator[tuple[str, dict[str, Callable[[], nn.Module]], Callable[[str], str]]]:
    """Every installed library: its name, its models, and the family of each."""
    if importlib.util.find_spec("torchvision"):
        without_operators()
        import torchvision

        names = torchvision.models.list_models(module=torchvision.models)
        build = torchvision.models.get_model_builder
        made = {n: lambda n=n: torchvision.models.get_model(n, weights=None) for n in names}  # type: ignore[misc]
        yield "torchvision", made, lambda name: build(name).__module__.rpartition(".")[2]
    if importlib.util.find_spec("timm"):
        import timm

        family = {n: m for m in timm.list_modules() for n in timm.list_models(module=m) if not n.startswith("test_")}
        yield "timm", {n: lambda n=n: timm.create_model(n, pretrained=False) for n in family}, family.__getitem__  # type: ignore[misc]
    if importlib.util.find_spec("pytorchcv"):
        from pytorchcv import model_provider

        found = {
            n: m for n, m in model_provider._models.items() if not any(other in n for other in NO_IMAGENET_NOR_CIFAR)
        }
        made = {n: lambda m=m: m(pretrained=False) for n, m in found.items()}  # type: ignore[misc]
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


def smallest(made: dict[str, Callable[[], nn.Module]], family: Callable[[str], str]) -> Iterator[tuple[str, str, int]]:
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


def parameters(make: Callable[[], nn.Module], most: int) -> int | None:
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


def examine(make: Callable[[], nn.Module], send: Any) -> None:
    """Send facts about one model as they are found: the row so far, however it ends."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = make()
    try:
        x = images(module)
    except Exception as error:
        send({f"why_{way}": f"takes no images: {first_line(error)}" for way in WAYS})
        return
    row: dict[str, Any] = {"kind": kind_of(module, x), "image": "x".join(map(str, x.shape[1:]))}
    send(row)
    for way, nested in WAYS.items():
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
            assert near(whole[-1], module(x), 1e-5), "the last answer is not the module's"
        for mine, theirs in zip(whole, staged, strict=True):
            assert near(mine, theirs, 1e-3), "stages and whole differ"
        check_work(net, x)
        check_leaks(net, x, staged)
    with tempfile.TemporaryDirectory() as folder:
        shape, classes = tuple(x.shape[1:]), tuple(map(str, range(whole[0].shape[1])))
        spec = nestling.Spec("it", shape, classes, net.sizes, mean=(0.5,) * shape[0], std=(0.5,) * shape[0])  # type: ignore[arg-type]
        nestling.export_net(net, spec, f"{folder}/it", x)  # which verifies what it wrote
        with nestling.Runtime(f"{folder}/it") as runtime:
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


def check_work(net: NestedNet, x: Tensor) -> None:
    """Torch's own counter (2 per multiply-accumulate) sees the planned work in every stage.

    It does not know the fused attention of CPUs, and counts nothing there: attention runs in its plain form."""
    state: tuple[Tensor, ...] = (x[:1],)
    for number, stage in enumerate(net.stages, start=1):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
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


def only_read(make: Callable[[], nn.Module], send: Any) -> None:
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


def apart(
    make: Callable[[], nn.Module], examine: Callable[[Callable[[], nn.Module], Any], None], most: float
) -> dict[str, Any]:
    """A model examined by a process of its own, so that one that takes too long or too much memory ends alone."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=examine, args=(make, there.send), daemon=True)
    start, row = time.monotonic(), dict[str, Any]()
    process.start()
    there.close()
    try:
        while here.poll(max(0.0, start + most - time.monotonic())):
            row = here.recv()
    except EOFError:
        pass
    else:
        process.kill()
    process.join()
    ended = f"ended by signal or exit {process.exitcode}" if process.exitcode != -9 else f"not done in {most:g} seconds"
    missing = {way: "unfinished" for way in WAYS if way not in row}
    return {**row, **missing, **{f"why_{way}": row.get(f"why_{way}", ended) for way in missing}}


def rows_of(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [dict(row) for row in csv.DictReader(file)]


def write(rows: list[dict[str, Any]], path: Path = FILE, columns: list[str] = COLUMNS) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (row["library"], row["family"])))


def commit() -> str:
    """Which code ran; a plus says that files were changed since."""
    git = ["git", "-C", str(RESULTS.parent)]
    number = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "src", "benchmarks/sweep.py"]).returncode
    return number + "+" * bool(changed)


def list_families() -> None:
    """The smallest model of every family, with its kind, written as they are found."""
    rows: list[dict[str, Any]] = []
    for library, made, family in libraries():
        version = importlib.metadata.version(library)
        for name, model, params in smallest(made, family):
            kind = apart(made[model], kind_alone, 600).get("kind", "")
            rows.append(dict(zip(LISTED, (library, version, name, model, params, kind), strict=True)))
            print(*rows[-1].values(), flush=True)
            write(rows, FAMILIES, LISTED)


def kind_alone(make: Callable[[], nn.Module], send: Any) -> None:
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


def run(each: dict[str, Any], make: Callable[[], nn.Module], most: float, code: str) -> dict[str, Any]:
    """The row of one family, which is shown too."""
    start = time.monotonic()
    facts = apart(make, examine, most)
    seconds = round(time.monotonic() - start, 1)
    row = {**{word: each[word] for word in ("library", "family", "model", "params")}, **facts, "commit": code}
    print(f"{row['library']:12}{row['model']:34}{'  '.join(f'{way} {row[way]}' for way in WAYS)}  {seconds} s")
    print(*(f"    {way}: {row[f'why_{way}']}\n" for way in WAYS if row.get(f"why_{way}")), sep="", end="", flush=True)
    return {**row, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="only list the families")
    parser.add_argument("--only", default="", help="only models whose name holds this text; nothing is written")
    parser.add_argument("--again", default="", help="only these models, whether or not they have a row")
    parser.add_argument("--kind", default="", choices=("", *KINDS), help="only families of this kind")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many minutes")
    parser.add_argument("--seconds", type=float, default=900, help="the most that one model may take in all three ways")
    parser.add_argument("--read", action="store_true", help="only say whether they are read; nothing is written")
    parser.add_argument("--table", action="store_true", help="only show the rows that are there")
    options = parser.parse_args()
    if options.list or not FAMILIES.exists():
        list_families()
    listed = rows_of(FAMILIES)
    if options.table:
        print("\n\n".join(table(rows_of(FILE), listed, kind) for kind in KINDS))
    if options.list or options.table:
        return
    until, again = time.monotonic() + 60 * options.minutes, options.again.split(",") if options.again else []
    finished = {key(row) for row in rows_of(FILE) if "unfinished" not in row.values()}
    done = finished if not again and not options.only else set()  # what was not finished is tried again
    code = commit()
    builders = {library: made for library, made, _ in libraries()}
    for each in sorted(listed, key=lambda row: int(row["params"])):
        named = each["model"] in again if again else options.only in each["model"]
        if not named or key(each) in done or options.kind not in ("", each["kind"]) or time.monotonic() > until:
            continue
        if options.read:
            print(
                each["library"],
                each["model"],
                apart(builders[each["library"]][each["model"]], only_read, options.seconds),
            )
            continue
        row = run(each, builders[each["library"]][each["model"]], options.seconds, code)
        if not options.only:
            write([*(other for other in rows_of(FILE) if key(other) != key(row)), row])


if __name__ == "__main__":
    main()
