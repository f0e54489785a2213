"""What stages cost: the nest against the un-nested net of equal MACs and against independent nets, in the same engine.

    python benchmarks/stages.py                                  # width-resnet42, CPU, one thread, ONNX Runtime
    python benchmarks/stages.py runs/NAME --threads 2 --json results/stages.json
    python benchmarks/stages.py width-resnet50 --side 112        # images of 112x112, random weights
    python benchmarks/stages.py --device cuda --json             # CUDA graphs, checked against eager torch first

Takes the name of a network or a run's folder. All figures of one run come from one process, in turns of ten, so that ratios
can be compared; medians count. "un-nested" is the fully connected net whose MACs come nearest to the nest's, its widths
multiples of 4. "independent" nets are of each stage's size. "at once" is each D_s straight from the image, with the state that
later stages go on from. Both are timed again and again, and "mixed": after the one before, small to large, when the caches
hold another net's weights. Refining is asked of a Runtime: from the answer of stage s to the last one, against what the same
stages take in one go; "asking" is a question to a runtime whose stage takes no time, and "over the sessions" what a question
takes longer than the same sessions run by hand, in turn, one after another and after a rest, without a deadline and with one.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestling.nets import NETS, NestedNet, Plan, build, plan
from nestling.nets.births import grow
from nestling.recipes.recipe import NetworkRecipe
from nestling.runs.open import resolve
from nestling.runs.provenance import provenance
from nestling.runtime import Anytime, Runtime, Spec
from nestling.runtime.build import build_engine
from nestling.runtime.engine import Engine, Floats, Stop
from nestling.runtime.verified import run_all

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}
LONG = 10  # times what all stages take: a deadline by which the last is done
REST = 0.002  # seconds before a question that is timed by itself
Shape = tuple[int, ...]
TURN = 10  # runs of one candidate before the next has its turn


def network(source: str, side: int) -> tuple[NestedNet, NetworkRecipe]:
    """A network by name (its batch norms warmed up by noise) for images of this side, or a run's."""
    if source not in NETS:
        run = resolve(source)
        return run.net(), run.recipe.network
    shape = (NETS[source].shape[0], side, side) if side else NETS[source].shape
    return warmed(NetworkRecipe(name=source), shape), NetworkRecipe(name=source)


def warmed(recipe: NetworkRecipe, shape: Shape) -> NestedNet:
    net = build(recipe, shape=shape).train()
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(8, net.plan.input.channels, *net.plan.input.size, generator=chance))
    return net.eval()


def equal_macs(recipe: NetworkRecipe, shape: Shape) -> tuple[int, ...]:
    """Widths of the un-nested network whose MACs come nearest to the nest's: multiples of 4 around one scale."""
    drawn = plan(recipe, shape=shape)
    target, widths = drawn.macs(drawn.stages), recipe.widths or NETS[recipe.name].widths
    full = unnested(recipe, widths, shape)
    scale = (target / full.macs(full.stages)) ** 0.5
    around = [sorted({max(4, int(w * scale) // 4 * 4 + step) for step in (-4, 0, 4, 8)}) for w in widths]

    def distance(chosen: tuple[int, ...]) -> float:
        """Off in MACs, and a little for leaving the network's proportions."""
        made = unnested(recipe, chosen, shape)
        bent = max(abs(c / (w * scale) - 1) for c, w in zip(chosen, widths, strict=True))
        return abs(made.macs(made.stages) / target - 1) + bent / 4

    return min((c for c in itertools.product(*around) if list(c) == sorted(c)), key=distance)


def unnested(recipe: NetworkRecipe, widths: tuple[int, ...], shape: Shape) -> Plan:
    """The plan of a one-stage network of these widths: the plan of the registry, without growth."""
    arch = replace(NETS[recipe.name], growth="", stripes=(), widths=widths)
    return arch.plan(f"{recipe.name}-unnested", grow(""), shape, arch.classes)


def plain_net(recipe: NetworkRecipe, widths: tuple[int, ...], shape: Shape) -> NestedNet:
    net = NestedNet(unnested(recipe, widths, shape)).reset(torch.Generator().manual_seed(0)).train()
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(8, net.plan.input.channels, *net.plan.input.size))
    return net.eval()


def through(engine: Engine, x: Floats, clock: Callable[[], float]) -> list[float]:
    """Seconds until each stage's answer."""
    began, done = clock(), []
    state = engine.start(x)
    for stage in range(1, engine.stages + 1):
        _, state = engine.step(stage, state, Stop())
        done.append(clock() - began)
    return done


def at_once(engine: Engine, stage: int, x: Floats, clock: Callable[[], float]) -> float:
    """Seconds of D_s straight from the image, with the state from which later stages go on; without jumps all stages up to it."""
    began, state = clock(), engine.start(x)
    for each in range(stage if engine.jumps else 1, stage + 1):
        _, state = engine.step(each, state, Stop())
    return clock() - began


def in_turns(candidates: dict[str, Callable[[], list[float]]], rounds: int) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {name: [] for name in candidates}
    for turn in range(rounds + 1):
        for name, work in candidates.items():
            work()
            times = [work() for _ in range(TURN)]
            if turn:  # the first round warms up
                found[name] += times
    return found


def summary(times: list[list[float]]) -> dict[str, Any]:
    columns = np.array(times) * 1e3
    return {
        "ms": [float(v) for v in np.median(columns, axis=0)],
        "p10_ms": [float(v) for v in np.percentile(columns, 10, axis=0)],
        "p90_ms": [float(v) for v in np.percentile(columns, 90, axis=0)],
        "n": len(times),
    }


class Instant:
    """An engine whose stages take no time: what is left of a question is handing it over and back."""

    name, stages, row_bytes, most, stops, jumps, places = "instant", 1, 1, 0, True, False, 1

    def start(self, x: Floats) -> None: ...

    def step(self, stage: int, state: None, stop: Stop) -> tuple[Floats, None]:
        return np.zeros((1, 2), np.float32), None

    def take(self, state: None, rows: Sequence[int]) -> None: ...

    def close(self) -> None: ...


def refining(runtime: Runtime, x: Floats, rounds: int) -> list[dict[str, float]]:
    """From stage s to the last: by refine, in one go, and what it takes to ask anything at all; medians, in turn."""
    spec, shape = runtime.spec, (1, 1, 1)
    rows = []
    with Anytime(Instant(), Spec("instant", shape, ("a", "b"), ("w1",))) as nothing:
        for stage in range(1, spec.stages):
            straight, refined, asking = [], [], []
            for _ in range(rounds * TURN):
                times = runtime.timeline(x)
                straight.append(times[-1] - times[stage - 1])
                answers = runtime.answers(x)
                answer = next(a for a in answers if a.stage == stage)
                answers.close()
                time.sleep(REST)  # the stage that was begun is abandoned meanwhile
                refined.append(answer.refine().elapsed)
                time.sleep(REST)
                asking.append(nothing.answer(np.zeros(shape, np.float32)).elapsed)
            one_go, by_refine, hand_over = (statistics.median(each) for each in (straight, refined, asking))
            row = {"from_stage": stage, "straight_ms": one_go * 1e3, "refine_ms": by_refine * 1e3}
            row |= {"asking_ms": hand_over * 1e3, "ratio_with_asking": by_refine / one_go}
            rows.append({**row, "ratio": (by_refine - hand_over) / one_go, "n": len(refined)})
    return rows


def over_sessions(runtime: Runtime, x: Floats, rest: float, deadline: float | None, rounds: int) -> dict[str, float]:
    """What asking takes over running the same sessions by hand, in microseconds: medians, in turn, each after a rest."""
    ways: dict[str, Callable[[], object]] = {
        "asked": partial(runtime.answer, x[0], deadline=deadline),
        "by hand": partial(at_once, runtime.engine, runtime.spec.stages, x, time.perf_counter),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds * TURN):
        for name, way in ways.items():
            time.sleep(rest)
            began = time.perf_counter()
            way()
            found[name].append(1e6 * (time.perf_counter() - began))
    asked, by_hand = (statistics.median(found[name]) for name in ways)
    return {"asked_us": asked, "by_hand_us": by_hand, "over_us": asked - by_hand, "n": len(found["asked"])}


def check(engine: Engine, net: NestedNet, device: str) -> dict[str, float]:
    """The largest difference from the network itself, run eagerly without TF32, at batch 1 and 32."""
    shape = (32, net.plan.input.channels, *net.plan.input.size)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = [logits.cpu().numpy() for logits in net.to(device)(x.to(device))]
    net.to("cpu")
    found = {}
    for batch in (1, 32):
        logits = run_all(engine, x.numpy(), batch)
        off = max(
            float(np.abs(a - b).max() / max(1, np.abs(b).max() / 10)) for a, b in zip(logits, expected, strict=True)
        )
        found[f"batch{batch}"] = off
        assert off <= 1e-4, f"the engine differs from the network by {off:.1e} at batch {batch}"
    return found


def bench(
    source: str, side: int, device: str, engine: str, threads: int, rounds: int, clock: Callable[[], float]
) -> dict[str, Any]:
    net, recipe = network(source, side)
    shape = (net.plan.input.channels, *net.plan.input.size)
    x = np.random.default_rng(0).normal(size=(1, net.plan.input.channels, *net.plan.input.size)).astype(np.float32)
    recipe = replace(recipe, alone=0, ensemble=False)
    widths = equal_macs(recipe, shape)
    plain = plain_net(recipe, widths, shape)
    alone = [warmed(replace(recipe, alone=stage), shape) for stage in range(1, len(net.plan.heads) + 1)]
    nest_engine = build_engine(net, device, engine, threads)
    checked = check(nest_engine, net, device)
    engines = {"nest": nest_engine, "un-nested": build_engine(plain, device, engine, threads)}
    engines |= {
        f"independent {s}": build_engine(each, device, engine, threads) for s, each in enumerate(alone, start=1)
    }
    candidates = {name: partial(through, each, x, clock) for name, each in engines.items()}
    independents = [engines[f"independent {s}"] for s in range(1, len(alone) + 1)]
    stages = range(1, len(alone) + 1)
    everything: dict[str, Callable[[], list[float]]] = {
        **candidates,
        **{f"at once {s}": partial(lambda s: [at_once(nest_engine, s, x, clock)], s) for s in stages},
        "at once, mixed": lambda: [at_once(nest_engine, s, x, clock) for s in stages],
        "independent, mixed": lambda: [through(each, x, clock)[-1] for each in independents],
    }
    times = {name: summary(each) for name, each in in_turns(everything, rounds).items()}
    nest, unnested_ms = times["nest"]["ms"][-1], times["un-nested"]["ms"][-1]
    with Runtime(net, device=device, engine=engine, threads=threads) as runtime:
        refined = refining(runtime, x[0], max(3, rounds // 2))
        asked = [runtime.answer(x[0]).elapsed for _ in range(100)]
        over = {
            name: over_sessions(runtime, x, rest, deadline, rounds)
            for name, rest, deadline in (
                ("one after another", 0.0, None),
                ("rested", REST, None),
                ("with a deadline", 0.0, LONG * nest / 1e3),
            )
        }
    dense, once = ([times[f"{kind} {stage}"]["ms"][-1] for stage in stages] for kind in ("independent", "at once"))
    mixed, mixed_dense = (times[f"{kind}, mixed"]["ms"] for kind in ("at once", "independent"))
    macs = [net.plan.macs(stage) for stage in range(1, net.plan.stages + 1)]
    dense_macs = [each.plan.macs(each.plan.stages) for each in alone]
    rate = zip(once, dense, macs, dense_macs, strict=True)
    return {
        "network": net.plan.name, "shape": list(shape), "stage_macs": macs, "independent_macs": dense_macs,
        "at_once_over_independent": [a / b for a, b in zip(once, dense, strict=True)],
        "at_once_over_independent_mixed": [a / b for a, b in zip(mixed, mixed_dense, strict=True)],
        "all_stages_over_largest": nest / dense[-1],
        "at_once_over_macs_at_its_rate": [a / (b * own / theirs) for a, b, own, theirs in rate],
        "over_sessions": over, "engine": nest_engine.name, "threads": threads, "checked": checked,
        "side_by_side": getattr(nest_engine, "side_by_side", None),
        "macs": net.plan.macs(net.plan.stages), "unnested_macs": plain.plan.macs(plain.plan.stages),
        "unnested_widths": list(widths), "times": times, "refine": refined,
        "runtime_ms": statistics.median(asked) * 1e3,
        "nest_over_unnested": nest / unnested_ms,
        "independents_over_nest": sum(mixed_dense) / nest,
        "noisy": any(times[k]["p90_ms"][-1] > 1.3 * times[k]["p10_ms"][-1] for k in ("nest", "un-nested", "independent, mixed")),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", default="width-resnet42", help="a network's name or a run's folder")
    parser.add_argument("--side", type=int, default=0, help="of images, for a network by name; 0 = its own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--clock", default="wall", choices=CLOCKS, help="cpu: this thread's own time, where others are busy"
    )
    parser.add_argument("--rounds", type=int, default=12, help=f"turns of {TURN} runs for every candidate")
    parser.add_argument("--json", nargs="?", const="-", help="a file, or stdout")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = bench(
        options.source,
        options.side,
        options.device,
        options.engine,
        options.threads,
        options.rounds,
        CLOCKS[options.clock],
    )
    result |= {"clock": options.clock, "provenance": provenance(" ".join(sys.argv), options.device, time.time)}
    if options.json:
        text = json.dumps(result, indent=2)
        print(text) if options.json == "-" else Path(options.json).write_text(text + "\n")
    if options.json != "-":
        report(result)


def report(result: dict[str, Any]) -> None:
    print(f"{result['network']}, {result['engine']}, threads {result['threads']}, {result['provenance']['device']}")
    print(f"checked against eager: {result['checked']}; side by side: {result['side_by_side']}")
    for name, each in result["times"].items():
        stages = " ".join(f"{v:7.3f}" for v in each["ms"])
        print(f"  {name:16} {stages} ms   (p10 {each['p10_ms'][-1]:.3f}, p90 {each['p90_ms'][-1]:.3f}, n={each['n']})")
    macs, other = result["macs"] / 1e6, result["unnested_macs"] / 1e6
    print(f"nest ({macs:.1f} M MACs) / un-nested ({other:.1f} M, widths {result['unnested_widths']}): ", end="")
    print(f"{result['nest_over_unnested']:.3f}   independents / nest: {result['independents_over_nest']:.3f}")
    for row in result["refine"]:
        one_go, refined = row["straight_ms"], row["refine_ms"]
        asking, plain = row["asking_ms"], row["ratio_with_asking"]
        print(
            f"  from stage {row['from_stage']} on: refine {refined:.3f} ms, of which asking {asking:.3f}, in one go ",
            end="",
        )
        print(f"{one_go:.3f}: {row['ratio']:.3f} without asking, {plain:.3f} with (n={row['n']})")
    for name in ("at_once_over_independent", "at_once_over_independent_mixed", "at_once_over_macs_at_its_rate"):
        print(f"{name.replace('_', ' ')}: {' '.join(f'{value:.2f}' for value in result[name])}")
    print(f"all stages one after another over the largest independent: {result['all_stages_over_largest']:.2f}")
    print(f"asked through the runtime: {result['runtime_ms']:.3f} ms")
    for name, each in result["over_sessions"].items():
        print(f"asking over the sessions, {name}: {each['over_us']:.0f} us (n={each['n']})")
    if result["noisy"]:
        print("this machine was busy: the 90th percentile is more than 30 % above the 10th; run again when it is quiet")


if __name__ == "__main__":
    main()
