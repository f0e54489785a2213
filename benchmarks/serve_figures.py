"""What the clients of benchmarks/serve.py got: figures of one contender at one rate, a table for the docs, a picture.

In: requests as load.py sent them, or a run as serve.py wrote it. Right is the same for all contenders: 1 - the test error of the
stage or network that answered, since which image was asked about changes nothing in the time. Of real networks the labels are
counted, too, on the thousand test images that come with us; these are easier than the whole test set.
"""

import json
from collections.abc import Sequence
from typing import Any

from load import Sent

LOADS = (0.5, 1.0, 2.0, 4.0)
CONTENDERS = {  # which are measured unless others are asked for, and what they are
    "nest": (True, "width-resnet42-cifar10"),
    "kept": (True, "width-resnet42-kept-cifar10: two narrow stages before an ordinary network"),
    "apart": (False, "the nest, its stages in a process of their own"),
    "chooser": (
        True,
        "three independent nets; each request gets the largest that is expected in time, by the work that waits",
    ),
    "full": (True, "the independent net of the last stage's size"),
    "ray": (True, "that net in Ray Serve; left out where --ray has none"),
}
LOOKS = {  # words, colour and marker
    "nest": ("nest", "#aa2c94", "o"),
    "kept": ("kept network", "#dd5e66", "v"),
    "apart": ("nest, stages in a process of their own", "#6a1fb0", "x"),
    "chooser": ("three nets, chosen by load", "#0072b2", "s"),
    "full": ("full net alone", "#4a5463", "D"),
    "ray": ("full net in Ray Serve", "#b07a00", "^"),
}
BEGIN, END = "<!-- benchmarks/serve.py --table writes from here -->\n", "<!-- to here -->\n"
BRIEF = "<!-- benchmarks/serve.py --table writes in brief from here -->\n"
SHED = (408, 429, 503, 504)  # a server's ways to say that there is no answer by the deadline


def summary(
    sent: Sequence[Sent], deadline: float, labels: Sequence[int], errors: Sequence[float], seconds: float
) -> dict[str, Any]:
    """What the clients got. `labels`: of the images, where the network is a trained one."""
    stages, right, true, late, by_sender, problems, took = [0] * (len(errors) + 1), 0.0, 0, 0, 0, 0, []
    for each in sent:
        said = json.loads(each.body) if each.status == 200 else {}
        took.append(each.came - each.due)
        on_time = took[-1] <= deadline
        late += not on_time
        by_sender += not on_time and each.came - each.went <= deadline
        problems += each.status not in (200, *SHED)
        stage = said["parameters"]["stage"] if said else 0
        if said and said["model_name"].isdigit():
            stage = int(said["model_name"])
        stages[stage] += 1
        if stage and on_time:
            right += 1 - errors[stage - 1]
            true += bool(labels) and int(said["outputs"][0]["data"][0]) == labels[each.image]
    n = len(sent)
    return {
        "n": n,
        "rate": n / seconds,
        "other_errors": problems,
        "nothing": stages[0] / n,
        "late": late / n,
        "late_by_sender": by_sender / n,
        "stages": [round(count / n, 5) for count in stages],
        "right_on_time": right / n,
        "goodput": right / seconds,
        **({"right_by_labels": true / n} if labels else {}),
        "ms": quantiles(took),
        "sent_late_ms": quantiles([each.went - each.due for each in sent]),
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds."""
    order, n = sorted(seconds), len(seconds)
    shares = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    return {name: round(1e3 * order[min(n - 1, int(share * n))], 2) for name, share in shares}


def share(part: float, n: int) -> str:
    """Per cent of n; few are told as a count."""
    count = round(part * n)
    return f"{100 * part:.1f}" if count > 20 else f"{100 * part:.3g} ({count})" if count else "0"


def table(run: dict[str, Any]) -> str:
    """Markdown. The best share at each rate is bold."""
    rows = {(load, name): each[str(load)] for name, each in run["contenders"].items() for load in LOADS}
    lines = [
        "| load | | right and in time, % | a second | no stage, % | late, % | stage 1 / 2 / 3, % | median / 99 % / most, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for load in LOADS:
        best = max(row["right_on_time"] for (at, _), row in rows.items() if at == load)
        for place, name in enumerate(run["contenders"]):
            row = rows[load, name]
            right = f"{100 * row['right_on_time']:.1f}"
            cells = [
                f"{load:g}x" if not place else "",
                LOOKS[name][0],
                f"**{right}**" if right == f"{100 * best:.1f}" else right,
                f"{row['goodput']:.0f}",
                share(row["nothing"], row["n"]),
                share(row["late"], row["n"]),
                " / ".join(f"{100 * each:.0f}" for each in row["stages"][1:]) if len(row["stages"]) > 2 else "",
                " / ".join(f"{row['ms'][name]:.1f}" for name in ("p50", "p99", "max")),
            ]
            lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join([*lines, "", said(run, list(rows.values()))])


def brief(run: dict[str, Any]) -> str:
    """Markdown, a line for each contender: the share that was right and in time at each rate, and how the highest rate went."""
    best = {load: max(each[str(load)]["right_on_time"] for each in run["contenders"].values()) for load in LOADS}
    lines = [
        f"| right and in time, % | {' | '.join(f'{load:g}x' for load in LOADS)} | no stage at {LOADS[-1]:g}x, % "
        f"| late at {LOADS[-1]:g}x, % | right a second at {LOADS[-1]:g}x |",
        "|---" * (len(LOADS) + 4) + "|",
    ]
    for name, rows in run["contenders"].items():
        cells = [LOOKS[name][0]]
        for load in LOADS:
            right, most = (f"{100 * part:.1f}" for part in (rows[str(load)]["right_on_time"], best[load]))
            cells.append(f"**{right}**" if right == most else right)
        last = rows[str(LOADS[-1])]
        cells += [share(last["nothing"], last["n"]), share(last["late"], last["n"]), f"{last['goodput']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", said(run, [row for each in run["contenders"].values() for row in each.values()])])


def with_table(page: str, run: dict[str, Any]) -> str:
    """A page with this run's table in its place, whole or in brief."""
    begin, write = (BRIEF, brief) if BRIEF in page else (BEGIN, table)
    before, _, rest = page.partition(begin)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"the page has no place for the table: {BEGIN.strip()} and {END.strip()}, each on a line")
    return f"{before}{begin}\n{write(run)}\n\n{END}{after}"


def said(run: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The conditions of a run, in words."""
    known, clients, counts = (
        run["conditions"],
        [row["client_cores"] for row in rows],
        sorted(row["n"] for row in rows),
    )
    late = [1e2 * row.get("late_by_sender", 0.0) for row in rows]
    old = (
        ""
        if any("right_by_labels" in row for row in rows)
        else " The nest's answers are counted by labels (an older run)."
    )
    return (
        f"{known['seconds']:g} s for each cell, {counts[0]:,} to {counts[-1]:,} requests, deadline "
        f"{1e3 * known['deadline']:g} ms. "
        f"The full net alone saturates at {known['saturation']:.0f} a second. The clients took {min(clients):.2f} to "
        f"{max(clients):.2f} of a core, and at most {max(late):.2f} % were late because they were sent late. "
        f"Errors other than refusals: {sum(row['other_errors'] for row in rows)}.{old}"
    )


def draw(run: dict[str, Any], file: str) -> None:
    """Of all requests, how many were answered rightly and in time; one line per contender."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.4), layout="constrained")
    for contender, rows in run["contenders"].items():
        text, colour, marker = LOOKS[contender]
        shares = [100 * rows[str(load)]["right_on_time"] for load in LOADS]
        axes.plot(range(len(LOADS)), shares, color=colour, marker=marker, alpha=0.85, label=text)
    axes.set_xticks(range(len(LOADS)), [f"{load:g}x" for load in LOADS])
    axes.set(
        xlabel="requests, as multiples of what the full net alone can answer",
        ylabel="right and in time, %",
        ylim=(0, 100),
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(file, dpi=140)
