"""Which versions of onnxruntime run exported stages, and give the network's own answers: each in an environment of its own.

    python benchmarks/versions.py 1.8.1 1.15.1 1.31.1 --python python3.8 python3.11 --json results/versions-cpu.json

Exports each network (float32, and in 8 bits with --int8), then installs each version into a folder of its own by the first of
the interpreters that pip finds a wheel for, and runs every stage there twice: by hand, as examples/clients/stages.py does,
and by nestling.runtime.portable where that Python is new enough. Answers are compared with the network's own by torch.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nestling.commands.export import command as export
from nestling.export.manifest import read_manifest
from nestling.runs.folder import shipped
from nestling.runs.open import resolve
from nestling.runs.provenance import provenance

Floats = NDArray[np.float32]
Run = Callable[..., subprocess.CompletedProcess[str]]
IMAGES = 64
FIRST_FOR_NUMPY_2 = (1, 19)  # of onnxruntime; older wheels do not say that they need numpy 1
BY_HAND = """
import json, sys
import numpy, onnxruntime
images = numpy.load(sys.argv[1])
for folder in sys.argv[2:]:
    stages = json.load(open(folder + "/manifest.json"))["stages"]
    sessions = [onnxruntime.InferenceSession(folder + "/" + s["file"], providers=["CPUExecutionProvider"]) for s in stages]
    found = []
    for image in images:
        values = {"input": image[None]}
        for stage, session in zip(stages, sessions):
            names = ["logits"] + stage["gives"]
            values.update(zip(names, session.run(names, {name: values[name] for name in stage["takes"]})))
            found.append(values["logits"][0])
    numpy.save(folder + "/by-hand.npy", found)
"""
PORTABLE = """
import sys
import numpy
from nestling.runtime.portable import Portable
images = numpy.load(sys.argv[1])
for folder in sys.argv[2:]:
    with Portable(folder) as runtime:
        numpy.save(folder + "/portable.npy", [answer.output for image in images for answer in runtime.answers(image)])
    assert "torch" not in sys.modules
"""
WAYS = {"by-hand": (BY_HAND, (3, 6)), "portable": (PORTABLE, (3, 11))}
SOURCE = Path(__file__).parent.parent / "src"


def expected(name: str) -> tuple[Floats, Floats]:
    """Real images, and what the network says of them at every stage, image by image."""
    opened = resolve(name)
    images = opened.images(IMAGES)
    with torch.no_grad():
        logits = torch.stack(list(opened.net().eval()(images)), 1)
    return images.numpy(), logits.flatten(0, 1).numpy()


def installed(version: str, interpreters: list[str], place: Path) -> Run | str:
    """A way to run code with this onnxruntime, by the first interpreter that pip finds a wheel for; or why there is none."""
    said = "no interpreter"
    numpy = "numpy<2" if tuple(map(int, version.split(".")[:2])) < FIRST_FOR_NUMPY_2 else "numpy"
    for number, interpreter in enumerate(interpreters):
        home = place / f"{version}-{number}"
        words = ["-m", "pip", "install", "-q", "--only-binary", ":all:", "--target", str(home)]
        done = subprocess.run([interpreter, *words, f"onnxruntime=={version}", numpy], capture_output=True, text=True)
        if not done.returncode:
            return partial(run, interpreter, f"{home}:{SOURCE}")
        said = (done.stderr.strip().splitlines() or ["failed"])[-1]
    return said


def run(interpreter: str, path: str, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([interpreter, "-c", code, *words], capture_output=True, text=True, env={"PYTHONPATH": path})


def compare(there: Run, folders: dict[str, Path], images: Path, answers: dict[str, Floats]) -> dict[str, Any]:
    """How far each folder's logits are from the network's, and how many classes differ; or what went wrong."""
    here = tuple(map(int, there("import sys; print(*sys.version_info[:2])").stdout.split()))
    found = there("import numpy, onnxruntime; print(numpy.__version__, onnxruntime.__version__)").stdout.split()
    row: dict[str, Any] = {"python": ".".join(map(str, here)), "numpy, onnxruntime": found, "ways": {}}
    for way, (code, least) in WAYS.items():
        if here < least:
            continue
        for name, folder in folders.items():
            (folder / f"{way}.npy").unlink(missing_ok=True)
            done = there(code, str(images), str(folder))
            if done.returncode:
                seen: dict[str, Any] = {"failed": done.stderr.strip().splitlines()[-1][:300]}
            else:
                logits, right = np.load(folder / f"{way}.npy"), answers[name]
                differ = int((logits.argmax(1) != right.argmax(1)).sum())
                seen = {"largest_difference": float(np.abs(logits - right).max()), "other_classes": differ}
            row["ways"].setdefault(way, {})[name] = seen
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", help="of onnxruntime")
    parser.add_argument("--networks", nargs="+", default=shipped())
    parser.add_argument(
        "--python", nargs="+", default=[sys.executable], help="interpreters, the first that fits is used"
    )
    parser.add_argument(
        "--int8", action="store_true", help="also in 8 bits, judged by classes that differ from float32's"
    )
    parser.add_argument("--json", help="a file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place, folders, answers, graphs = Path(scratch), {}, {}, {}
        for name in options.networks:
            images, right = expected(name)
            for kind in ("", "-int8") if options.int8 else ("",):
                folder = folders[name + kind] = place / (name + kind)
                export(name, out=str(folder), int8=bool(kind))
                answers[name + kind] = right
                graphs[name + kind] = declared(folder)
        np.save(place / "images.npy", images)
        rows = {}
        for version in options.versions:
            there = installed(version, options.python, place)
            rows[version] = (
                {"failed": there} if isinstance(there, str) else compare(there, folders, place / "images.npy", answers)
            )
            print(version, json.dumps(rows[version]), file=sys.stderr)
            result = {"images": IMAGES, "graphs": graphs, "versions": rows}
            result |= {"provenance": provenance(" ".join(sys.argv), "cpu", time.time)}
            if options.json:  # after every version: this takes long
                Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


def declared(folder: Path) -> dict[str, int]:
    """The highest opset and IR version that any stage asks for."""
    import onnx

    models = [onnx.load(folder / stage.file) for stage in read_manifest(folder).stages]
    return {"opset": max(m.opset_import[0].version for m in models), "ir": max(m.ir_version for m in models)}


if __name__ == "__main__":
    main()
