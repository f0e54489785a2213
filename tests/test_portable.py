"""nestling.runtime.portable: the same answers and deadlines without torch, and nothing that is not what was exported."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestling.errors import NestlingError
from nestling.export.manifest import checksum
from nestling.files import MANIFEST
from nestling.nets import NestedNet, build
from nestling.recipes.recipe import NetworkRecipe
from nestling.runtime import Runtime
from nestling.runtime.confidence import Outcomes
from nestling.runtime.external import has_external_data
from nestling.runtime.portable import Portable
from nestling.runtime.runtime import bare_spec
from nestling.runtime.verified import export_net


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
        for mine, theirs in zip(portable.answers_batch(x), runtime.answers_batch(x), strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert (a.stage, a.size, a.final) == (b.stage, b.size, b.final)
                np.testing.assert_allclose(a.probabilities, b.probabilities, atol=1e-6)
        first = portable.answer(x[0], deadline=0)
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
        answer = runtime.answer(x, deadline=limit)
        late.append(time.monotonic() - began - limit)
        stages.append(answer.stage)
    last = runtime.answer(x, deadline=10.0)
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


def text(part: str) -> Callable[[Path], None]:
    """A manifest that no JSON library of ours would write."""

    def spoil(folder: Path) -> None:
        found = (folder / MANIFEST).read_text()
        (folder / MANIFEST).write_text(re.sub(r'"latencies": \[[^]]*\]', part, found))

    return spoil


def rewrite(change: Callable[[Any], Any], stage: int = 1) -> Callable[[Path], None]:
    """Another graph in the place of a stage's, with its right checksum in the manifest."""

    def spoil(folder: Path) -> None:
        import onnx

        path = folder / f"stage{stage}.onnx"
        model = onnx.load(path, load_external_data=False)
        change(model)
        path.write_bytes(model.SerializeToString())
        edit(lambda m: m["stages"][stage - 1].update(sha256=checksum(path.read_bytes())))(folder)

    return spoil


def outside(tensor: Any) -> None:
    """A tensor that lies in a file outside the folder; what it was is there."""
    from onnx import numpy_helper

    Path("secret.bin").write_bytes(numpy_helper.to_array(tensor).tobytes())
    tensor.ClearField("raw_data")
    tensor.ClearField("float_data")
    tensor.data_location = 1
    tensor.external_data.add(key="location", value="secret.bin")


def outside_in_a_branch(model: Any) -> None:
    """The same deep inside: in a constant of a graph that is an attribute of a node."""
    from onnx import TensorProto, helper, numpy_helper

    tensor = numpy_helper.from_array(np.zeros(3, np.float32), "secret")
    outside(tensor)
    inner = helper.make_graph([helper.make_node("Constant", [], ["c"], value=tensor)], "inner", [], [
        helper.make_tensor_value_info("c", TensorProto.FLOAT, [3])
    ])  # fmt: skip
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node.append(helper.make_node("If", ["yes"], ["never read"], then_branch=inner, else_branch=inner))


def lie(model: Any) -> None:
    """Logits of another shape than the graph says, which nobody can see before it runs."""
    from onnx import helper, numpy_helper

    [last] = [node for node in model.graph.node if "logits" in node.output]
    last.output[list(last.output).index("logits")] = "real"
    model.graph.initializer.append(numpy_helper.from_array(np.array([2], np.int64), "two"))
    model.graph.node.extend([
        helper.make_node("Shape", ["real"], ["shape"]),
        helper.make_node("ReduceProd", ["shape"], ["all"], keepdims=1),
        helper.make_node("Div", ["all", "two"], ["half"]),
        helper.make_node("Concat", ["two", "half"], ["other"], axis=0),
        helper.make_node("Reshape", ["real", "other"], ["logits"]),
    ])  # fmt: skip


def double(model: Any) -> None:
    from onnx import TensorProto, helper

    [last] = [node for node in model.graph.node if "logits" in node.output]
    last.output[list(last.output).index("logits")] = "real"
    model.graph.node.append(helper.make_node("Cast", ["real"], ["logits"], to=TensorProto.DOUBLE))
    [end] = [each for each in model.graph.output if each.name == "logits"]
    end.type.tensor_type.elem_type = TensorProto.DOUBLE


def pipe(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return spoil


def directory(folder: Path) -> None:
    (folder / "stage1.onnx").unlink()
    (folder / "stage1.onnx").mkdir()


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
    (edit(lambda m: m["shapes"].update(input=[1, 9, 9])), "its network takes"),
    (edit(lambda m: m["network"]["classes"].append("eleventh")), "prior|not the one described"),
    (edit(lambda m: m.update(form="pt2")), "--format onnx"),
    (lambda f: (f / "stage1.onnx").unlink(), "cannot read"),
    (corrupt, "checksum differs"),
    (truncate, "checksum differs"),
    (garbage_with_a_right_checksum, "cannot be read"),
    (swap, "not the one described"),
    (rewrite(lambda model: outside(model.graph.initializer[0])), "keeps tensors in other files"),
    (rewrite(outside_in_a_branch, 2), "stage 2 keeps tensors in other files"),
    (rewrite(lie), "stage 1 fails on a black image"),
    (rewrite(double, 3), "stage 3 is not the one described"),
    (pipe("stage1.onnx"), "stage1.onnx: it is a folder, pipe or device"),
    (pipe(MANIFEST), "pipe or device"),
    (directory, "stage1.onnx: it is a folder"),
    (lambda f: (f / MANIFEST).write_text("[" * 100_000), "nested too deeply"),
    (text('"latencies": [1e999]'), "1e999 is not a number"),
    (text('"latencies": [NaN]'), "NaN is not a number"),
    (edit(lambda m: m.update(latencies=[-1])), "not seconds"),
    (edit(lambda m: m["network"].update(mean=[10**400], std=[1])), "does not describe"),
    (edit(lambda m: m["network"].update(shape=[1, 100_000, 100_000])), "at most 268,435,456 values"),
    (edit(lambda m: m["shapes"].update(input=[100_000, 100_000, 1])), "at most 268,435,456 values"),
    (edit(lambda m: m["shapes"].update(input=[1, 8, 8.0])), "whole numbers"),
    (edit(lambda m: m["shapes"].update({f"x{i}": [2**26] for i in range(5)})), "more memory"),
    (edit(lambda m: m["shapes"].update(input=8)), "damaged"),
    (edit(lambda m: m["stages"][0].update(file="stage1\0.onnx")), "without NUL"),
    (edit(lambda m: m["network"].update(name="\0")), "without NUL"),
    (edit(lambda m: m["stages"][0].update(takes=["input", "input"])), "repeat"),
    (edit(lambda m: m["stages"][0].update(sha256=5)), "5 is no name"),
    (edit(lambda m: m["stages"][0].update(file="\ud800")), "is no name"),
    (edit(lambda m: m["stages"][0].update(stage=2)), "its graph 1 is said to be stage 2"),
    (edit(lambda m: m["stages"][0].update(size="w9")), "its graph 1 is said to be stage 1, 'w9'"),
    (edit(lambda m: m["network"].update(shape=[8, 8, 1])), "its network takes"),
    (edit(lambda m: m["network"]["classes"].__setitem__(0, "\ud800")), "is no name"),
    (edit(lambda m: m["network"].update(part=1e-320)), "expected a number from 0.01 to 1"),
    (edit(lambda m: m["network"].update(part=True)), "expected a number from 0.01 to 1"),
    (edit(lambda m: m.update(latencies=[0.1])), "not seconds of 3 stages"),
    (edit(lambda m: m.update(precision="int4")), "its precision 'int4'"),
    (edit(lambda m: m.update(about=[])), "about is a list"),
]


@pytest.mark.parametrize(("spoil", "complaint"), SPOILT, ids=[complaint for _, complaint in SPOILT])
def test_what_is_not_what_was_exported_is_refused(
    folder: Path, spoil: Callable[[Path], Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)  # ONNX Runtime looks for external data from here
    spoil(folder)
    with pytest.raises(NestlingError, match=complaint):
        Portable(folder)


def test_the_untouched_copy_is_accepted(folder: Path) -> None:
    with Portable(folder) as runtime:
        assert runtime.answer(np.zeros(runtime.spec.shape, np.float32)).final


def test_an_export_stops_when_it_is_sure_if_it_knows_how_sure_it_was(
    exported: tuple[NestedNet, Path], tmp_path: Path
) -> None:
    net, folder = exported
    with (
        Portable(folder) as runtime,
        pytest.raises(NestlingError, match="exported without outputs for held-out images"),
    ):
        runtime.stop_when_sure()
    sure = np.linspace(0.2, 1, 400, dtype=np.float32)
    seen = Outcomes(np.stack([sure] * 3), np.stack([sure > 0.4, sure > 0.3, sure > 0.25]))
    export_net(net, bare_spec(net), tmp_path / "knows", torch.randn(4, 1, 8, 8), held_out=seen)
    knows = tmp_path / "knows"
    with Portable(knows) as runtime, Runtime(knows) as other:
        assert runtime.stop_when_sure(0.0).images == 200 and other.stop_when_sure(0.0).thresholds == other.thresholds
        assert runtime.thresholds and runtime.thresholds[0] >= 0.4
    kept = (knows / "held-out.bin").read_bytes()
    assert fits(json.loads((knows / MANIFEST).read_text()), schema_of_manifests())
    for spoilt in (kept[:-1], kept[:-1] + b"\2", b"\xff" * len(kept)):
        (knows / "held-out.bin").write_bytes(spoilt)
        with Portable(knows) as runtime:
            with pytest.raises(NestlingError, match="checksum differs"):
                runtime.stop_when_sure()
            edit(lambda m, data=spoilt: m["held_out"].update(sha256=checksum(data)))(knows)  # type: ignore[misc]
            with pytest.raises(NestlingError, match="not how sure"):
                runtime.stop_when_sure()
        edit(lambda m: m["held_out"].update(sha256=checksum(kept)))(knows)
    edit(lambda m: m["held_out"].update(file="../held-out.bin"))(knows)
    with pytest.raises(NestlingError, match="not inside the folder"):
        Portable(knows)


@given(data=st.binary(max_size=200))
def test_bytes_that_are_no_graph_are_read_or_refused(data: bytes) -> None:
    """Whatever is in them, looking for external data ends."""
    try:
        found = has_external_data(data)
    except ValueError as error:
        assert str(error)
    else:
        assert found in (True, False)


def test_a_graph_within_a_graph_within_a_graph() -> None:
    from onnx import ModelProto

    model = ModelProto()
    graph = model.graph
    for _ in range(20):
        graph = graph.node.add().attribute.add().g
    assert not has_external_data(model.SerializeToString())
    graph.sparse_initializer.add().indices.data_location = 1
    assert has_external_data(model.SerializeToString())


# --- without nestling at all ------------------------------------------------------------------------------------------


def fits(found: Any, schema: dict[str, Any]) -> bool:
    """As much of JSON Schema as ours uses."""
    kinds: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float)}
    if "const" in schema or "enum" in schema:
        return found in schema.get("enum", [schema.get("const")])
    if not isinstance(found, kinds[schema["type"]]) or isinstance(found, bool):
        return False
    if isinstance(found, str):
        return re.search(schema.get("pattern", ""), found) is not None
    if isinstance(found, list):
        return all(fits(each, schema["items"]) for each in found)
    if isinstance(found, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        rest = [value for key, value in found.items() if key not in known]
        right = all(others is not False and (others is True or fits(value, others)) for value in rest)
        named = all(fits(found[key], known[key]) for key in known if key in found)
        return right and named and set(schema.get("required", ())) <= set(found)
    least, most = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    return bool(least <= found <= most and found > schema.get("exclusiveMinimum", -math.inf))


def schema_of_manifests() -> Any:
    return json.loads((resources.files("nestling.export") / "manifest.schema.json").read_text())


def test_a_manifest_is_what_its_schema_says(folder: Path) -> None:
    schema = schema_of_manifests()
    found = json.loads((folder / MANIFEST).read_text())
    assert fits(found, schema)
    assert set(schema["properties"]) == set(found) | {"held_out"} and set(
        schema["properties"]["network"]["properties"]
    ) == set(found["network"])
    for spoil in (
        {"version": 2}, {"form": "tf"}, {"more": 1}, {"shapes": {"input": [0]}}, {"latencies": [-1.0]},
        {"stages": [found["stages"][0] | {"file": "../x"}]}, {"stages": [found["stages"][0] | {"sha256": "x"}]},
        {"network": found["network"] | {"errors": [-1.0]}}, {"network": found["network"] | {"part": 0}},
    ):  # fmt: skip
        assert not fits(found | spoil, schema), spoil
    assert not fits({key: value for key, value in found.items() if key != "shapes"}, schema)


CLIENTS = Path(__file__).parent.parent / "examples" / "clients"
NODE = Path(os.environ.get("NESTLING_NODE", "."))  # the folder where onnxruntime-node is installed
ORT = Path(os.environ.get("NESTLING_ORT", "."))  # a release of ONNX Runtime for C++, unpacked: include/ and lib/


def python_client(place: Path) -> list[str]:
    return [sys.executable, str(CLIENTS / "stages.py")]


def node_client(place: Path) -> list[str]:
    program = shutil.which("node")
    if program is None or not (NODE / "node_modules" / "onnxruntime-node").is_dir():
        pytest.skip("npm install onnxruntime-node, and name that folder in NESTLING_NODE")
    return [program, str(CLIENTS / "stages.mjs")]


def cpp_client(place: Path) -> list[str]:
    compiler = shutil.which("g++")
    if compiler is None or not (ORT / "include" / "onnxruntime_cxx_api.h").is_file():
        pytest.skip("install g++ and nlohmann-json3-dev, unpack a release of ONNX Runtime, and name it in NESTLING_ORT")
    made, lib = place / "stages", (ORT / "lib").resolve()
    words = ["-std=c++17", "-Wall", "-Werror", str(CLIENTS / "stages.cpp"), "-I", str(ORT / "include")]
    subprocess.run(
        [compiler, *words, "-L", str(lib), "-lonnxruntime", f"-Wl,-rpath,{lib}", "-o", str(made)], check=True
    )
    return [str(made)]


@pytest.mark.parametrize("client", [python_client, node_client, cpp_client])
def test_clients_of_twenty_lines_answer_as_we_do(
    exported: tuple[NestedNet, Path], client: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    net, folder = exported
    program = client(tmp_path)
    image = torch.randn(1, 8, 8)
    with torch.no_grad():
        expected = [f"{stage} {int(logits.argmax())}" for stage, logits in enumerate(net(image[None]), start=1)]
    for seconds, count in ((60, len(expected)), (0, 1)):
        ran = subprocess.run(
            [*program, str(folder), str(seconds)],
            input=image.numpy().tobytes(), capture_output=True, cwd=NODE, timeout=120, check=True,
        )  # fmt: skip
        assert ran.stdout.decode().split("\n")[:-1] == expected[:count]
