"""`nestling predict`: what a run's network thinks of pictures, stage by stage, until a deadline.

In: a run's folder, picture files or folders of them, a deadline. Out: for every picture the answer of each stage that was
done, and the one that counts (none, if no stage was), or why it cannot be read, which is also said on stderr, once. Pictures
are turned upright (EXIF), cut to their middle square and scaled to the network's input.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from nestling.commands import waiting
from nestling.errors import NestlingError
from nestling.runs.device import pick_device
from nestling.runs.open import resolve
from nestling.runtime.inputs import check_threads
from nestling.runtime.runtime import Runtime

PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
BAR = 24  # characters


def command(
    run: str,
    images: tuple[str, ...],
    deadline_ms: float = 0.0,
    device: str = "auto",
    engine: str = "auto",
    threads: int = 1,
    loss: float = -1.0,
    build: str = "",
) -> dict[str, Any]:
    """Answer pictures stage by stage, until a deadline. One that cannot be read is named, and the others are answered.

    Args:
        run: the run's folder, the name of a trained network that comes with nestling, or a folder of exported stages.
        images: picture files, or folders of them.
        deadline_ms: milliseconds for each picture; 0 = all stages.
        device: auto, cpu or cuda.
        engine: auto (the fastest there is), onnx, openvino, eager or graph.
        threads: CPU threads, 0 for all cores; more are faster on a quiet machine, one keeps its pace on a busy one.
        loss: stop early where an answer is sure enough, losing at most this share of accuracy, such as 0.005; -1 = never.
        build: the function that builds a network of your own, such as my_file.py:build.
    """
    paths = find(images)
    if not deadline_ms >= 0:
        raise NestlingError(f"found a deadline of {deadline_ms} ms; expected 0 (none) or more")
    if not (loss == -1 or 0 <= loss < 1):
        raise NestlingError(
            f"found a loss of {loss}; expected a share of accuracy, such as 0.005, or -1 (never stop early)"
        )
    check_threads(threads)
    pick_device(device, "--device ")  # is refused before anything that takes time
    problems = {path: problem for path in paths if (problem := absent(path))}
    for problem in problems.values():  # before anything that takes time
        say(problem)
    waiting.at(f"opening {run}")
    with Runtime(resolve(run, build) if build else run, device, engine, threads) as runtime:
        if len(runtime.spec.shape) != 3:
            raise NestlingError(
                f"{run} takes inputs of shape {runtime.spec.shape}, which are no pictures; ask nestling.Runtime in Python"
            )
        if loss >= 0:
            runtime.stop_when_sure(loss)
        limit = deadline_ms / 1e3 if deadline_ms else None
        answered: list[dict[str, Any]] = []
        waiting.at(f"answering {len(paths)} pictures")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a deadline of")  # is in milliseconds here, and cannot be mistaken
            for path in paths:
                found = {"error": problems[path]} if path in problems else predict(runtime, path, limit)
                answered.append({"image": str(path), **found})
        known = {"network": runtime.spec.name, "engine": runtime.engine.name, "deadline_ms": deadline_ms or None}
    broken = sum("error" in image for image in answered)
    left = f"{broken} of {len(paths)} files or folders cannot be read as pictures; repair them or leave them out"
    return {"run": run, **known, "images": answered, "incomplete": left if broken else ""}


def find(names: tuple[str, ...]) -> list[Path]:
    """The picture files that were named, folders opened. A missing one and a folder without any are kept."""
    if "" in names:  # an empty variable, say, which would be the folder we are in
        raise NestlingError("found an empty name for a picture; give files or folders")
    found: list[Path] = []
    for path in map(Path, names):
        below = (each for each in path.rglob("*") if not hidden(each.relative_to(path)))
        inside = sorted(each for each in below if each.suffix.lower() in PICTURES and not each.is_dir())
        found += inside or [path]
    if not found:
        raise NestlingError("no picture was named; give files or folders")
    return found


def hidden(path: Path) -> bool:
    """Whether it, or a folder on the way, is not for people to see: thumbnails and what systems keep beside files."""
    return any(part.startswith(".") for part in path.parts)


def absent(path: Path) -> str:
    """What is wrong with a path that leads to no picture; "" if nothing is."""
    if path.is_dir():
        return f"the folder {path} holds no pictures ({', '.join(sorted(PICTURES))})"
    return "" if path.exists() or path.is_symlink() else f"there is no picture {path}; name files or folders"


def say(problem: str) -> None:
    print(problem, file=sys.stderr, flush=True)


def predict(runtime: Runtime, path: Path, limit: float | None) -> dict[str, Any]:
    """What every stage said in time, and the last of them; of a picture that cannot be read only the error, said at once."""
    try:
        from nestling.data.picture_file import Unreadable, fitted
    except ImportError as error:
        raise NestlingError(f"reading pictures needs Pillow ({error}); run: pip install 'nestling[data]'") from error
    try:
        x = fitted(path, runtime.spec.shape, part=runtime.spec.part)
    except Unreadable as error:
        problem = f"{path} cannot be read as a picture ({error})"
        say(problem)
        return {"error": problem}
    said = [answer.to_dict() for answer in runtime.answers(x, deadline=limit)]
    return {"stages": said, "answer": said[-1] if said else None}


def show(result: dict[str, Any]) -> Group:
    """A small table per picture that could be read, with bars."""
    limit = f", deadline {result['deadline_ms']:g} ms" if result["deadline_ms"] else ""
    tables: list[Any] = [f"{result['network']} ({result['engine']}{limit})"]
    for image in result["images"]:
        if "error" in image:
            continue
        tables.append(Text(image["image"], style="italic"))  # no title: it would be markup, and as narrow as the table
        table = Table(box=None, padding=(0, 1), show_header=False)
        for row in image["stages"]:
            stage, mark = f"stage {row['stage']} {row['size']}", "*" if row is image["stages"][-1] else " "
            if "output" in row:
                table.add_row(mark, stage, f"{row['ms']:.2f} ms", f"output of shape {shape_of(row['output'])}")
                continue
            table.add_row(
                mark, stage, f"{row['ms']:.2f} ms", row["class"], f"{100 * row['probability']:.1f} %", bar(row)
            )
        if not image["stages"]:
            table.add_row("  no answer: no stage was done by the deadline")
        tables.append(table)
    return Group(*tables)


def shape_of(output: Any) -> tuple[int, ...]:
    """The shape of lists in lists."""
    return (len(output), *shape_of(output[0])) if isinstance(output, list) and output else ()


def bar(row: dict[str, Any]) -> Text:
    """A bar for the probability, in eighths of a character."""
    eighths = round(row["probability"] * BAR * 8)
    full, part = divmod(eighths, 8)
    text = "█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")
    return Text(text.ljust(BAR, "·"), style="green" if row["final"] else "cyan")
