"""The README's first picture: error against the time until each answer, independent networks beside the nests.

    python benchmarks/first_picture.py --measure     # times of every network here, in turns, on one CPU thread, then the picture
    python benchmarks/first_picture.py               # the picture from the times and errors on record

Times: results/first-picture-cpu.json, ONNX Runtime, 10th percentiles, one process. Errors: results/cifar10-h200.csv, means over
as many seeds as there are (bars: standard deviation). All were trained by one recipe (SGD, cosine, averaged weights, 200
epochs). Independent networks one after another are the rival where nobody knows the time beforehand: their times add up.
"""

import argparse
import itertools
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from stages import in_turns, summary, through, warmed

from nestling.nets import NestedNet
from nestling.recipes.recipe import NetworkRecipe
from nestling.report.figures.panel import cost_axis, error_axis, panel
from nestling.report.paper.price import BEST, PLAIN, TAUGHT
from nestling.report.theme import ALONE, FAINT, SCHEMES, Look
from nestling.runs.open import resolve
from nestling.runs.provenance import provenance
from nestling.runtime.build import build_engine
from nestling.studies.paper.results import Row, compare, read_results

TIMES, ERRORS, PICTURE = (
    Path("results/first-picture-cpu.json"),
    "results/cifar10-h200.csv",
    Path("docs/pictures/error-against-time.png"),
)
FAST = "p10_ms"  # what one in ten is faster than: work beside it hardly moves that
NEST, KEPT = "width-resnet42-cifar10", "width-resnet42-kept-cifar10"
W4 = ("alone", PLAIN, 3)
# Independent networks by their MACs: what is built, and whose errors they have (strategy, changes, stage).
INDEPENDENT = {
    "24 M": (NetworkRecipe("width-resnet42", alone=1), ("alone", PLAIN, 1)),
    "76 M": (NetworkRecipe("width-resnet42", alone=3, widths=(16, 24, 56)), ("alone", f"network.widths=16,24,56 {PLAIN}", 3)),
    "388 M": (NetworkRecipe("width-resnet42", alone=3), W4),
}  # fmt: skip
NESTS = {
    "nest, stages share their weights": (NEST, [("sgd", BEST, stage) for stage in (1, 2, 3)]),
    "nest that keeps an ordinary network": (KEPT, [("sgd", TAUGHT, 1), ("sgd", TAUGHT, 2), W4]),
}


def measure(rounds: int) -> dict[str, Any]:
    """Milliseconds until each answer of every network, in turns."""
    nets: dict[str, NestedNet] = {name: resolve(name).net() for name in (NEST, KEPT)}
    nets |= {name: warmed(recipe, (3, 32, 32)) for name, (recipe, _) in INDEPENDENT.items()}
    x = np.random.default_rng(0).standard_normal((1, 3, 32, 32)).astype(np.float32)
    engines = {name: build_engine(net, "cpu", "onnx", 1) for name, net in nets.items()}
    times = in_turns({name: partial(through, engine, x, time.perf_counter) for name, engine in engines.items()}, rounds)
    origin = provenance("python benchmarks/first_picture.py --measure", "cpu", time.time)
    return {"times": {name: summary(each) for name, each in times.items()}, "provenance": origin}


def error(rows: list[Row], strategy: str, changes: str, stage: int) -> Row:
    """Mean, deviation and number of seeds of one stage."""
    wanted = (strategy, changes, stage)
    [found] = [
        row for row in rows if (row["strategy"], row["changes"], row["stage"]) == wanted and row["epochs"] == 200
    ]
    return found


def lines(times: dict[str, Any], rows: list[Row]) -> list[tuple[str, Look, list[float], list[Row]]]:
    """What is drawn: a name, a look, milliseconds and errors."""
    alone = [error(rows, *which) for _, which in INDEPENDENT.values()]
    taken = [times[name][FAST][0] for name in INDEPENDENT]
    found = [
        ("one independent network, chosen before", Look(ALONE, "o", ":", hollow=True), taken, alone),
        (
            "independent networks, one after another",
            Look(FAINT, "v", "--", hollow=True),
            [*itertools.accumulate(taken)],
            alone,
        ),
    ]
    for number, (name, (network, which)) in enumerate(NESTS.items()):
        look = Look(SCHEMES[number], "os"[number])
        found.append((name, look, times[network][FAST], [error(rows, *each) for each in which]))
    return found


def draw(drawn: list[tuple[str, Look, list[float], list[Row]]]) -> bytes:
    with panel(6.2, 3.9) as whole:
        axes = whole.axes
        for name, look, xs, found in drawn:
            ys, spread = [row["error"] / 100 for row in found], [(row["std"] or 0) / 100 for row in found]
            axes.errorbar(
                xs, ys, spread, color=look.colour, linestyle=look.style, marker=look.marker, markerfacecolor=look.face,
                capsize=2.5, elinewidth=1, label=name, drawstyle="steps-post",  # an answer stands until a better one
            )  # fmt: skip
        cost_axis(axes, [x for _, _, xs, _ in drawn for x in xs], lambda ms: f"{ms:g} ms")
        error_axis(axes, [row["error"] / 100 for *_, found in drawn for row in found])
        axes.set_xlabel("until the answer, one image on one CPU thread")
        axes.set_title("CIFAR-10 test error against time")
        whole.legend_below(2)
        return whole.picture("error-against-time", "CIFAR-10 test error against time", "").png


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--measure", action="store_true")
    asked.add_argument("--rounds", type=int, default=30)
    given = asked.parse_args()
    if given.measure:
        TIMES.write_text(json.dumps(measure(given.rounds), indent=1) + "\n", encoding="utf-8")
    found = lines(json.loads(TIMES.read_text(encoding="utf-8"))["times"], compare(read_results(ERRORS)))
    PICTURE.write_bytes(draw(found))
    for name, _, xs, rows in found:
        said = ", ".join(
            f"{row['error']:.2f} % (n = {row['n']}) after {x:.2f} ms" for x, row in zip(xs, rows, strict=True)
        )
        print(f"{name}: {said}")


if __name__ == "__main__":
    main()
