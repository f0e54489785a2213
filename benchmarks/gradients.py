"""What a step with one gradient per task costs, against the summed loss and against other libraries.

    python benchmarks/gradients.py                                     all cases on the CPU: time and memory
    python benchmarks/gradients.py --combine-only --device cuda        Gram matrix and update alone, against copying

Every round runs all methods once, in an order drawn anew; a figure is the median over rounds of the ratio to the
summed loss of the same round, in CPU seconds of one thread (what else runs on the machine disturbs those less;
--threads 2 takes wall seconds). The C library is told to keep freed memory, for every method, since otherwise page
faults are half of what is measured; --trim leaves it alone. Memory is measured in a fresh process for each method,
above the loaded model: the peak resident set, and the peak of what torch allocated (some of which may never be
touched). Rivals that are not installed are left out. --json prints one JSON line.
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


def ours(net: nn.Module, losses: Callable[[], list[Tensor]]) -> Step:
    from nestling.gradients import Accumulator
    from nestling.gradients.combiners import OSGD

    rows = Accumulator(net, OSGD())

    def step() -> None:
        net.zero_grad()
        rows.backward(losses())

    return step


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

METHODS: dict[str, Callable[[nn.Module, Callable[[], list[Tensor]]], Step]] = {
    "summed loss": summed,
    "nestling osgd": ours,
    "torchjd, vmap": torchjd(None),
    "torchjd, chunk 1": torchjd(1),
    "torchjd, autogram": autogram,
    "pytorch_optimizer PCGrad": pcgrad,
    "conflictfree ConFIG": config,
}


def ready(case: "Case | str") -> dict[str, Step]:
    """Every method that is installed, warmed up."""
    steps = {}
    for name, make in METHODS.items():
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


def measure(rounds: int, seed: int, names: list[str]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for case_name in names:
        case = CASES[case_name]
        seconds = timed(case, rounds, seed)
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


# Combining alone.


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The parameters of a ResNet-50: 25.6 M entries in 161 tensors."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convs = [(width, before, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convs.append((4 * width, before, 1, 1))
            before = 4 * width
            shapes += [shape for conv in convs for shape in (conv, conv[:1], conv[:1])]
    return [*shapes, (1000, 2048), (1000,)]


def combine_only(device: str, tasks: int, repeats: int, asked: bool = False) -> list[dict[str, object]]:
    """Gram matrix, weights and update of rows that own everything, checked, against copying as many bytes."""
    from nestling.gradients import kernels
    from nestling.gradients.combiners import OSGD
    from nestling.gradients.owners import MemoryShape, from_masks
    from nestling.gradients.rows import Rows

    kernels.WANTED = asked
    generator = torch.Generator(device).manual_seed(0)
    params = [torch.zeros(shape, device=device, requires_grad=True) for shape in resnet50_shapes()]
    entries = sum(p.numel() for p in params)
    base = torch.randn(entries, generator=generator, device=device)
    dense = torch.stack([base + torch.randn(entries, generator=generator, device=device) for _ in range(tasks)])
    layout = from_masks(tuple(MemoryShape.of(p) for p in params), (2**tasks - 1,) * len(params), tasks)
    combine = OSGD()

    def fresh() -> list[list[Tensor | None]]:
        split = [dense[t].split([p.numel() for p in params]) for t in range(tasks)]
        return [[part.view(p.shape).clone() for part, p in zip(parts, params, strict=True)] for parts in split]

    def step(rows: list[list[Tensor | None]]) -> Tensor:
        for p in params:
            p.grad = None
        report = combine(Rows(params, layout, [list(row) for row in rows]))
        assert report.gram is not None
        return report.gram[0]

    stored = fresh()
    gram = step(stored).cpu()
    found = torch.cat([p.grad.flatten() for p in params if p.grad is not None])
    wide = dense.double()
    exact = (wide @ wide.T).cpu()
    lower = torch.linalg.cholesky(exact)
    weights = torch.linalg.solve_triangular((lower / lower.diagonal()).T, torch.ones(tasks, 1).double(), upper=True)
    wanted = (weights.T.to(device) @ wide)[0]
    errors = {
        "gram_error": float(((gram - exact).abs() / exact.abs().max()).max()),
        "update_error": float((found.double() - wanted).norm() / wanted.norm()),
    }
    assert errors["gram_error"] < 1e-8 and errors["update_error"] < 1e-6, errors
    del wide, found, wanted

    stored = fresh()
    bandwidth = copy_bandwidth(device, repeats)
    floor = (2 * tasks + 1) * entries * 4 / bandwidth  # read for the Gram matrix, read and write for the update
    ways: dict[str, Step] = {"eager": lambda: void(step(stored))}
    if device == "cuda":
        ways["cuda graph"] = captured(lambda: void(step(stored)))
    rows = []
    for name, way in ways.items():
        seconds = clocked(way, device, repeats)
        rows.append(
            {
                "tasks": tasks,
                "entries": entries,
                "way": f"{name}, {'kernels' if asked else 'plain'}",
                "ms": round(1000 * statistics.median(seconds), 4),
                "floor_ms": round(1000 * floor, 4),
                "ratio": round(statistics.median(seconds) / floor, 3),
                "low": round(min(seconds) / floor, 3),
                "high": round(max(seconds) / floor, 3),
                "copy_gb_s": round(bandwidth / 1e9, 1),
                "repeats": repeats,
                **{key: f"{value:.1e}" for key, value in errors.items()},
            }
        )
    return rows


def void(_: object) -> None:
    """Drop a value, so that a step returns nothing."""


def captured(step: Step) -> Step:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def clocked(step: Step, device: str, repeats: int) -> list[float]:
    """Seconds per step; on a GPU of ten steps in a row, which is how a training loop queues them."""
    seconds = []
    for _ in range(3):
        step()
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                step()
            stop.record()
            torch.cuda.synchronize()
            seconds.append(start.elapsed_time(stop) / 10_000)
        else:
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
    return seconds


def copy_bandwidth(device: str, repeats: int) -> float:
    """Bytes read and written per second by one large copy."""
    source = torch.ones(100_000_000, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / statistics.median(clocked(lambda: void(target.copy_(source)), device, repeats))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--combine-only", action="store_true")
    parser.add_argument("--tasks", type=int, default=4, help="for --combine-only")
    parser.add_argument("--memory-of", choices=list(METHODS), help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trim", action="store_true", help="let the C library give freed memory back")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(json.dumps(memory_here(CASES[options.case[0]], options.memory_of)))
        return
    if options.combine_only:
        found = []
        for asked in (True, False) if options.device == "cuda" else (False,):
            try:
                found += combine_only(options.device, options.tasks, options.rounds, asked)
            except Exception as error:  # the other version is still worth measuring
                print(f"{'kernels' if asked else 'plain'}: {error!r}", file=sys.stderr)
        if not found:
            sys.exit(1)
        heading = condition(options.device)
        print(json.dumps({"condition": heading, "rows": found}) if options.json else f"{heading}\n\n{table(found)}")
        return
    if not options.trim and any(os.environ.get(name) != value for name, value in KEEP.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP})  # read at start-up only
    rows = measure(options.rounds, options.seed, options.case or list(CASES))
    if options.json:
        print(json.dumps({"condition": condition(options.device), "rows": rows}))
    else:
        print(condition(options.device), table(rows), sep="\n\n")


if __name__ == "__main__":
    main()
