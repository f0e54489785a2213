"""Putting a finished run among those that come with nestling: `python -m nestling.runs.ship RUN NAME`.

In: a run's folder and the data it was trained on. Out: shipped/NAME, a run's folder with its convolutions rounded to float16,
and results, outputs and gallery of the weights as they are then, measured on a CPU; of many classes, outputs for the first
images only. Its results also say what its stages err on the images that come with nestling, and how long they took where the
run was profiled.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from nestling.errors import NestlingError
from nestling.files import GALLERY, OUTPUTS, PROFILE, PROVENANCE, RECIPE, RESULTS, WEIGHTS
from nestling.runs.evaluate import errors, evaluate, gallery
from nestling.runs.folder import SHIPPED, RunDir
from nestling.runs.open import OpenedRun, resolve, sample_file, stored_sample

FIRST = 1000  # test images of a sample, unless its file holds fewer
NUMBERS = (
    600_000  # logits that are kept: of three stages and ten classes all, of two hundred classes those of 1,000 images
)
CONDITIONS = ("device", "engine", "threads", "batch", "dtype", "repeats", "stages")


def ship(source: str, name: str, to: Path = SHIPPED) -> RunDir:
    """Fill a folder beside its place, and move it there when it is whole."""
    if (to / name).exists():
        raise NestlingError(f"{to / name} is there already; delete it or choose another name")
    run = resolve(source)
    data = run.data()
    net = run.net(data=data)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() == 4:
                parameter.copy_(parameter.half())
    found, tensors = evaluate(net, data)
    logits, labels = tensors["logits"], tensors["labels"]
    stored = sample_file(data.name).is_file()
    sample = len(stored_sample(data.name)["labels"]) if stored else FIRST
    first = [round(float(error), 6) for error in errors(logits[:, :sample], labels[:sample])]
    chosen = gallery(logits[:, :sample], labels[:sample])
    pictures = {} if stored else {"images": data.test.pictures(chosen)}
    n = max(sample, NUMBERS // (len(logits) * len(data.classes)))
    made = RunDir.create(to / "new" / name)
    made.save_tensors(WEIGHTS, {k: v.half() if v.dim() == 4 else v for k, v in net.state_dict().items()})
    narrow = torch.uint8 if len(data.classes) <= 256 else torch.int16
    made.save_tensors(OUTPUTS, {"logits": logits[:, :n].half(), "labels": labels[:n].to(narrow)})
    made.save_tensors(GALLERY, {"indices": chosen, **pictures})
    for file in (RECIPE, PROVENANCE):
        made.write_json(file, run.read_json(file))
    made.write_json(
        RESULTS, {**found, "sample": {"n": min(sample, len(labels)), "errors": first}, "latency": latency(run)}
    )
    made.path.rename(to / name)
    made.path.parent.rmdir()
    return RunDir(to / name)


def latency(run: OpenedRun) -> dict[str, Any]:
    """What a run's profile says of every stage, and where it was measured; {} for a run without one."""
    found = run.read_json(PROFILE) if run.has(PROFILE) else {}
    return {key: found[key] for key in CONDITIONS if found}


if __name__ == "__main__":
    ship(sys.argv[1], sys.argv[2])
