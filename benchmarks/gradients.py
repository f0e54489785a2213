"""What a step with one gradient per task costs, against the summed loss and against other libraries, on a CPU.

    python benchmarks/gradients.py --rounds 7 --json results/gradients-cpu.json      all cases; --case replaces the rows of one
    python benchmarks/gradients.py --table results/gradients-cpu.json    the tables of docs/log/gradients.md and docs/gradients.md

Every round runs all methods once, in an order drawn anew; a figure is the median over rounds of the ratio to the summed loss of
the same round, in CPU seconds of one thread (--threads 2: wall seconds). The C library is told to keep freed memory, for every
method, since otherwise page faults are half of what is measured; --trim leaves it alone. Memory is measured in a fresh process
per method, above the loaded model: peak resident set, and peak of what torch allocated. Rivals not installed are left out.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trunks import TRUNKS, trunk_problem

Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """3x3 convolutions on 32x32 images; the width doubles where the image is halved; exits after some of them."""

    widths: tuple[int, ...]
    exits: tuple[int, ...]
    batch: int


def thirds(width: int, convs: int) -> tuple[int, ...]:
    return (width,) * convs + (2 * width,) * convs + (4 * width,) * convs


CASES: dict[str, "Case | str"] = {
    **{name: name for name in TRUNKS},
    "3 exits, 0.5 M parameters, batch 64": Case(thirds(32, 3), (3, 6, 9), 64),
    "6 exits, 0.7 M parameters, batch 64": Case(thirds(32, 4), (2, 4, 6, 8, 10, 12), 64),
    # Exits at about a quarter, a half and the whole of the work, as the paper spaces them.
    "3 exits, 7.7 M parameters, batch 4": Case(thirds(128, 3), (3, 5, 9), 4),
}


class Exits(nn.Module):
    """Convolution, batch norm, ReLU. No running statistics, which some rivals refuse."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        self.heads = nn.ModuleList()
        stage: list[nn.Module] = []
        before = 3
        for index, width in enumerate(case.widths, start=1):
            stride = 2 if width == 2 * before else 1
            stage += [
                nn.Conv2d(before, width, 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(width, track_running_stats=False),
                nn.ReLU(),
            ]
            before = width
            if index in case.exits:
                self.stages.append(nn.Sequential(*stage))
                self.heads.append(nn.Linear(width, 10))
                stage = []

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x)
            found.append(head(x.mean((2, 3))))
        return found


def problem(case: "Case | str") -> tuple[nn.Module, Callable[[], list[Tensor]]]:
    if isinstance(case, str):
        return trunk_problem(case)
    torch.manual_seed(0)
    net = Exits(case)
    x, y = torch.randn(case.batch, 3, 32, 32), torch.randint(10, (case.batch,))
    return net, lambda: [F.cross_entropy(out, y) for out in net(x)]


# One step of each method: zero the gradients, forward, fill `.grad`. No optimizer.


def summed(net: nn.Module, losses: Callable[[], list[Tensor]]) -> Step:
    def step() -> None:
        net.zero_grad()
        torch.stack(losses()).sum().backward()

    return step


def floor(net: nn.Module, losses: Callable[[], list[Tensor]]) -> Step:
    """No method: every task comes back to the first weight, and one makes the weights' gradients. No Gram matrix, no rows."""
    first = next(net.parameters())

    def step() -> None:
        net.zero_grad()
        *others, last = losses()
        for loss in others:
            torch.autograd.grad(loss, first, retain_graph=True)
        last.backward()

    return step


def ours(net: nn.Module, losses: Callable[[], list[Tensor]]) -> Step:
    from nestling.gradients import Accumulator
    from nestling.gradients.combiners import OSGD

    rows = Accumulator(net, OSGD())

    def step() -> None:
        net.zero_grad()
        rows.backward(losses())

    return step


def plainly(net: nn.Module, losses: Callable[[], list[Tensor]]) -> Step:
    """Ours with the products that torch makes by itself: what the method saves, apart from what a faster library does."""
    from nestling.gradients import products

    step, here = ours(net, losses), products.present

    def plain() -> None:
        products.present = lambda: False
        try:
            step()
        finally:
            products.present = here

    return plain


def torchjd(chunk: int | None) -> Callable[[nn.Module, Callable[[], list[Tensor]]], Step]:
    def make(net: nn.Module, losses: Callable[[], list[Tensor]]) -> Step:
        from torchjd.autojac import backward, jac_to_grad

        from nestling.gradients.combiners.torchjd import OSGDAggregator

        aggregator = OSGDAggregator()

        def step() -> None:
            net.zero_grad()
            backward(losses(), parallel_chunk_size=chunk)
            jac_to_grad(net.parameters(), aggregator)

        return step

    return make


def autogram(net: nn.Module, losses: Callable[[], list[Tensor]]) -> Step:
    from torchjd.autogram import Engine

    from nestling.gradients.combiners.torchjd import OSGDWeighting

    engine, weighting = Engine(net, batch_dim=None), OSGDWeighting()

    def step() -> None:
        net.zero_grad()
        stacked = torch.stack(losses())
        stacked.backward(weighting(engine.compute_gramian(stacked)))

    return step


def pcgrad(net: nn.Module, losses: Callable[[], list[Tensor]]) -> Step:
    from pytorch_optimizer import PCGrad

    optimizer = PCGrad(torch.optim.SGD(net.parameters(), lr=0.1))

    def step() -> None:
        optimizer.zero_grad()
        optimizer.pc_backward(losses())  # type: ignore[arg-type]

    return step


def config(net: nn.Module, losses: Callable[[], list[Tensor]]) -> Step:
    from conflictfree.grad_operator import ConFIG_update
    from conflictfree.utils import apply_gradient_vector, get_gradient_vector

    def step() -> None:
        net.zero_grad()
        found, rows = losses(), []
        for index, loss in enumerate(found):
            net.zero_grad()
            loss.backward(retain_graph=index < len(found) - 1)
            rows.append(get_gradient_vector(net, none_grad_mode="zero"))
        apply_gradient_vector(net, ConFIG_update(rows), none_grad_mode="zero", zero_grad_mode="pad_value")

    return step


KEEP = {"MALLOC_TOP_PAD_": "268435456", "MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_MAX_": "0"}

RESULTS = Path(__file__).parent.parent / "results" / "gradients-cpu.json"
OURS = "nestling osgd"
PLAINLY = f"{OURS}, torch's own products"
METHODS: dict[str, Callable[[nn.Module, Callable[[], list[Tensor]]], Step]] = {
    "summed loss": summed,
    "floor: every task back, one weight gradient": floor,
    OURS: ours,
    PLAINLY: plainly,
    "torchjd, vmap": torchjd(None),
    "torchjd, chunk 1": torchjd(1),
    "torchjd, autogram": autogram,
    "pytorch_optimizer PCGrad": pcgrad,
    "conflictfree ConFIG": config,
}


def methods_of(case: "Case | str") -> list[str]:
    """All; but where there are convolutions alone, products of matrices make no difference."""
    return [name for name in METHODS if name != PLAINLY or isinstance(case, str)]


def ready(case: "Case | str") -> dict[str, Step]:
    """Every method that is installed, warmed up."""
    steps = {}
    for name in methods_of(case):
        make = METHODS[name]
        try:
            steps[name] = make(*problem(case))
        except ImportError as missing:
            print(f"left out: {name} ({missing})", file=sys.stderr)
            continue
        for _ in range(2):
            steps[name]()
    return steps


def timed(case: "Case | str", rounds: int, seed: int) -> dict[str, list[float]]:
    """Seconds per step, per method and round."""
    steps = ready(case)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    draw = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name in draw.sample(list(steps), len(steps)):
            start = clock()
            steps[name]()
            seconds[name].append(clock() - start)
    return seconds


def resident(field: str) -> float:
    """MiB from this process's status: VmRSS now, or VmHWM at its highest."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1024


def memory_here(case: "Case | str", method: str) -> dict[str, float]:
    """MiB of a step above the loaded model: peak resident set, and peak of what torch allocated. In a fresh process."""
    warm = METHODS[method](*problem(Case(thirds(16, 1), (1, 2, 3), 4)))
    warm()  # whatever a method loads and sets up is not what a step needs
    net, losses = problem(case)
    step = METHODS[method](net, losses)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as reset:
        reset.write("5")  # the high-water mark starts anew
    before = resident("VmRSS")
    for _ in range(2):
        step()
    peak = resident("VmHWM") - before
    net.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    results = profile.profiler.kineto_results
    events = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    now = most = 0
    for _, size in events:
        now += size
        most = max(most, now)
    return {"resident_mib": round(peak, 1), "allocated_mib": round(most / 2**20, 1)}


def memory(case_name: str, method: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--memory-of", method, "--case", case_name]
    # Freed blocks go back to the system at once, so that the peak is what was held together.
    plain = {name: value for name, value in os.environ.items() if name not in KEEP}
    frugal = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env={**plain, **frugal})
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def measure(case_name: str, rounds: int, seed: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    seconds = timed(CASES[case_name], rounds, seed)
    for method, own in seconds.items():
        ratios = sorted(a / b for a, b in zip(own, seconds["summed loss"], strict=True))
        quarter = len(ratios) // 4
        rows.append(
            {
                "case": case_name,
                "method": method,
                "ratio": round(statistics.median(ratios), 3),
                "low": round(ratios[quarter], 3),
                "high": round(ratios[-1 - quarter], 3),
                "ms": round(1000 * statistics.median(own), 1),
                **memory(case_name, method),
                "rounds": rounds,
            }
        )
        print(f"{case_name}: {method}: {rows[-1]['ratio']}", file=sys.stderr)
    return rows


def condition(device: str) -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("nestling", "torchjd", "pytorch_optimizer", "conflictfree"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    return {"device": name, "dtype": "float32", **versions}


def table(rows: list[dict[str, object]]) -> str:
    """The rows as a Markdown table."""
    heads = list(rows[0])
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(str(row[h]) for h in heads) + " |" for row in rows])


def cell(row: dict[str, object]) -> str:
    spread = "" if row["method"] == "summed loss" else f" ({row['low']:.2f} to {row['high']:.2f})"
    return f"{row['ratio']:.{2 if spread else 0}f}{spread} / {row['resident_mib']:.0f}"


def for_docs(rows: list[dict[str, object]], cases: list[str]) -> str:
    """Methods down, cases across: time over the summed loss, quartiles, MiB."""
    cells = {(row["case"], row["method"]): cell(row) for row in rows}
    lines = [f"| time over the summed loss / MiB | {' | '.join(cases)} |", "|---" * (len(cases) + 1) + "|"]
    for method in [name for name in METHODS if any(name in methods_of(CASES[case]) for case in cases)]:
        name = f"**{method}**" if method == OURS else method
        lines.append(f"| {name} | {' | '.join(cells.get((case, method), '') for case in cases)} |")
    return "\n".join(lines)


def tables(file: Path) -> list[str]:
    """Of a file of results: exits along the way, then heads at the end."""
    rows = json.loads(file.read_text())["rows"]
    return [for_docs(rows, [case for case in CASES if (case in TRUNKS) == trunk]) for trunk in (False, True)]


def brief(file: Path) -> str:
    """Of a file of results, cases down: medians of time over the summed loss, MiB, and of TorchJD's ways the fastest."""
    rows = json.loads(file.read_text())["rows"]
    heads = ["time over the summed loss / MiB", "summed loss", f"**{OURS}**", "TorchJD, its fastest way", "PCGrad"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case in CASES:
        of = {row["method"]: row for row in rows if row["case"] == case}
        best = min((row for name, row in of.items() if name.startswith("torchjd")), key=lambda row: float(row["ratio"]))
        own, pcgrad = of[OURS], of["pytorch_optimizer PCGrad"]
        cells = [f"{row['ratio']:.2f} / {row['resident_mib']:.0f}" for row in (own, best, pcgrad)]
        lines.append(f"| {case} | 1 / {of['summed loss']['resident_mib']:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def before(file: Path | None, heading: dict[str, str], names: list[str]) -> dict[str, Any]:
    """What a file has beside the rows of these cases."""
    if file is None or not file.exists():
        return {"rows": []}
    document: dict[str, Any] = json.loads(file.read_text())
    document["rows"] = [row for row in document["rows"] if row["case"] not in names]
    if document["rows"] and document["condition"] != heading:
        sys.exit(
            f"{file} was made under {document['condition']}, now is {heading}: run all cases, or name another file"
        )
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, beside those of other cases")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the tables of such a file, run nothing")
    parser.add_argument("--memory-of", choices=list(METHODS), help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trim", action="store_true", help="let the C library give freed memory back")
    options = parser.parse_args()
    if options.table:
        print(*tables(options.table), brief(options.table), sep="\n\n")
        return
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(json.dumps(memory_here(CASES[options.case[0]], options.memory_of)))
        return
    if not options.trim and any(os.environ.get(name) != value for name, value in KEEP.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP})  # read at start-up only
    heading = condition("cpu")
    document = before(options.json, heading, options.case or list(CASES))
    document |= {"command": f"python benchmarks/gradients.py --rounds {options.rounds}", "condition": heading}
    for name in options.case or CASES:
        document["rows"] += measure(name, options.rounds, options.seed)
        if options.json:  # after every case: a run that is stopped has not been for nothing
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(heading, table(document["rows"]), sep="\n\n")


if __name__ == "__main__":
    main()
