"""nestling.runtime.portable: the same answers and deadlines without torch, and nothing that is not what was exported."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nestling.errors import NestlingError
from nestling.export import export_net
from nestling.nets import NestedNet, build
from nestling.recipes.recipe import NetworkRecipe
from nestling.runtime import Runtime
from nestling.runtime.manifest import MANIFEST, checksum
from nestling.runtime.portable import Portable
from nestling.runtime.runtime import bare_spec


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[NestedNet, Path]:
    net = build(NetworkRecipe(name="width-digits")).train()
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(16, 1, 8, 8))
    folder = tmp_path_factory.mktemp("exported") / "stages"
    export_net(net.eval(), bare_spec(net), folder, torch.randn(40, 1, 8, 8))
    return net, folder


@pytest.fixture
def folder(exported: tuple[NestedNet, Path], tmp_path: Path) -> Path:
    """A copy to spoil."""
    copied = tmp_path / "stages"
    copied.mkdir()
    for path in exported[1].iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    return copied


def test_portable_and_runtime_answer_alike(exported: tuple[NestedNet, Path]) -> None:
    net, folder = exported
    x = np.random.default_rng(0).normal(size=(5, 1, 8, 8)).astype(np.float32)
    with Portable(folder) as portable, Runtime(net, device="cpu") as runtime:
        for mine, theirs in zip(portable.answers(x), runtime.answers(x), strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert (a.stage, a.size, a.final) == (b.stage, b.size, b.final)
                np.testing.assert_allclose(a.probabilities, b.probabilities, atol=1e-6)
        first = portable.answer(x[0], 0)
        assert first.stage == 0 and first.refine().stage == 3


WITHOUT_TORCH = """
import builtins, json, random, sys, time
real = builtins.__import__
def refuse(name, *rest):
    if name.split(".")[0] in ("torch", "safetensors", "onnx"):
        raise ImportError(f"{name} is not installed here")
    return real(name, *rest)
builtins.__import__ = refuse
import numpy as np
from nestling.runtime.portable import Portable
with Portable(sys.argv[1]) as runtime:
    x = np.random.default_rng(0).normal(size=(1, 8, 8)).astype(np.float32)
    full = sorted(runtime.answer(x).elapsed for _ in range(50))[25]
    chance, late, bare, stages = random.Random(0), [], [], []
    for _ in range(300):
        limit = full * chance.uniform(0.2, 1.5)
        began = time.monotonic()
        time.sleep(limit)
        bare.append(time.monotonic() - began - limit)
        began = time.monotonic()
        answer = runtime.answer(x, limit)
        late.append(time.monotonic() - began - limit)
        stages.append(answer.stage)
    last = runtime.answer(x, 10.0)
late.sort(), bare.sort()
loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "onnx", "safetensors"))
print(json.dumps({"late": late, "bare": bare, "stages": stages, "last": last.stage, "loaded": loaded,
                  "p": last.probabilities.tolist()}))
"""


def test_deadlines_are_kept_with_torch_not_importable(exported: tuple[NestedNet, Path]) -> None:
    net, folder = exported
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(folder)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["loaded"] == [] and found["last"] == 3 and len(found["stages"]) == 300
    x = np.random.default_rng(0).normal(size=(1, 1, 8, 8)).astype(np.float32)
    with torch.no_grad():
        expected = net(torch.from_numpy(x))[-1].softmax(1)[0].numpy()
    np.testing.assert_allclose(found["p"], expected, atol=1e-5)
    # Against a bare timer in the same process; the real figures are those of benchmarks/deadlines.py.
    assert found["late"][285] <= found["bare"][285] + 0.005


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "import sys; sys.modules['torch'] = None; import nestling; nestling.Runtime",
            "nestling.Runtime: torch is not",
        ),
        (
            "import sys; sys.modules['rich'] = None; from nestling.__main__ import entry; sys.argv[1:] = ['--help']; entry()",
            "nestling: rich is not",
        ),
    ],
)
def test_what_is_missing_is_named_with_what_to_install(code: str, says: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and says in last and "pip install nestling" in last
    assert "Runtime" in says or len(done.stderr.splitlines()) == 1


# --- what is not what was exported -------------------------------------------------------------------------------


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        found = json.loads((folder / MANIFEST).read_text())
        change(found)
        (folder / MANIFEST).write_text(json.dumps(found))

    return spoil


def corrupt(folder: Path) -> None:
    data = bytearray((folder / "stage2.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "stage2.onnx").write_bytes(bytes(data))


def truncate(folder: Path) -> None:
    (folder / "stage3.onnx").write_bytes((folder / "stage3.onnx").read_bytes()[:100])


def garbage_with_a_right_checksum(folder: Path) -> None:
    (folder / "stage1.onnx").write_bytes(b"not a graph")
    edit(lambda m: m["stages"][0].update(sha256=checksum(b"not a graph")))(folder)


def swap(folder: Path) -> None:
    """Intact graphs in the wrong places."""

    def exchange(found: dict[str, Any]) -> None:
        one, two = found["stages"][1], found["stages"][2]
        for key in ("file", "sha256"):
            one[key], two[key] = two[key], one[key]

    edit(exchange)(folder)


SPOILT: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: (f / MANIFEST).unlink(), "no manifest.json"),
    (lambda f: (f / MANIFEST).write_text("{"), "cannot be read"),
    (lambda f: (f / MANIFEST).write_text("[]"), "not a manifest"),
    (edit(lambda m: m.update(version=99)), "version 99"),
    (edit(lambda m: m.pop("stages")), "damaged"),
    (edit(lambda m: m["network"].pop("classes")), "does not describe"),
    (edit(lambda m: m["stages"].pop()), "lists 2 graphs for 3"),
    (edit(lambda m: m["stages"][0].update(file="../stage1.onnx")), "not inside the folder"),
    (edit(lambda m: m["stages"][1]["takes"].append("nowhere@1")), "what shape"),
    (edit(lambda m: m["shapes"].update(input=[1, 9, 9])), "not the one described"),
    (edit(lambda m: m["network"]["classes"].append("eleventh")), "prior|not the one described"),
    (edit(lambda m: m.update(form="pt2")), "--format onnx"),
    (lambda f: (f / "stage1.onnx").unlink(), "cannot read"),
    (corrupt, "checksum differs"),
    (truncate, "checksum differs"),
    (garbage_with_a_right_checksum, "cannot be read"),
    (swap, "not the one described"),
]


@pytest.mark.parametrize(("spoil", "complaint"), SPOILT, ids=[complaint for _, complaint in SPOILT])
def test_what_is_not_what_was_exported_is_refused(folder: Path, spoil: Callable[[Path], Any], complaint: str) -> None:
    spoil(folder)
    with pytest.raises(NestlingError, match=complaint):
        Portable(folder)


def test_the_untouched_copy_is_accepted(folder: Path) -> None:
    with Portable(folder) as runtime:
        assert runtime.answer(np.zeros(runtime.spec.shape, np.float32), 10.0).final
