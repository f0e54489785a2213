"""The networks that come with nestling are run folders like any other, and do what their results say, on real images where
they are to be had."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.table import Table

import nestling
from nestling.commands import evaluate, export, predict, profile, report
from nestling.commands.train import command as train_command
from nestling.data import load
from nestling.data.image_folder import shown
from nestling.data.picture_file import fitted, read
from nestling.errors import NestlingError
from nestling.files import MANIFEST, RESULTS, WEIGHTS
from nestling.recipes import named
from nestling.recipes.recipe import DataRecipe, override
from nestling.runs.folder import SHIPPED, RunDir, shipped
from nestling.runs.open import resolve
from nestling.runs.ship import FIRST, ship
from nestling.runtime.confidence import find_thresholds
from nestling.runtime.portable import Portable
from nestling.train import train

NAMES = shipped()
SAMPLES = {"cifar10": FIRST, "tiny-imagenet": 200}  # images that come with us
SIZE = 41_000_000  # bytes in shipped/: three networks and a thousand images of CIFAR-10, one and 200 of Tiny ImageNet


def stamps() -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in [SHIPPED, *SHIPPED.rglob("*")]}


@pytest.mark.parametrize("name", NAMES)
def test_a_network_loads_and_answers(name: str) -> None:
    net, run = nestling.load(name), resolve(name)
    x = torch.zeros(1, *run.results["shape"])
    with torch.no_grad():
        answers = list(net.answers(x))
    assert [stage["size"] for stage in run.results["stages"]] == list(net.sizes)
    assert all(answer.shape == (1, len(run.results["classes"])) for answer in answers)
    kept = "-kept" if run.recipe.network.keep else ""
    assert run.recipe.network.name + kept == run.results["network"]
    provenance = run.read_json("provenance.json")
    assert provenance["commit"] and provenance["device"] and provenance["command"]
    latency = run.results["latency"]
    medians = [stage["median_ms"] for stage in latency["stages"]]
    assert latency["device"] and medians == sorted(medians) and len(medians) == len(net.sizes)


@pytest.mark.parametrize("name", NAMES)
def test_evaluating_a_network_gives_what_its_card_says(name: str) -> None:
    """`nestling evaluate` on the first real test images, which are stored, on a CPU: exactly the card's errors."""
    before = stamps()
    words = [sys.executable, "-m", "nestling", "evaluate", name, "--sample", "--json"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    found, run = json.loads(done.stdout), resolve(name)
    card = run.results["sample"]
    assert (found["n"], found["data"]) == (card["n"], run.recipe.data.name) == (SAMPLES[found["data"]], found["data"])
    assert [round(stage["error"], 6) for stage in found["stages"]] == card["errors"] == found["card"]
    assert [stage["size"] for stage in found["stages"]] == [stage["size"] for stage in run.results["stages"]]
    assert found["stored"] is False and stamps() == before
    table = evaluate.show(found)
    assert "its card says" in str(table.caption) and "nothing is stored" in str(table.caption)


@pytest.mark.parametrize("name", NAMES)
def test_a_network_stops_when_it_is_sure_and_loses_what_was_allowed(name: str) -> None:
    run = resolve(name)
    said = run.outputs()
    wrong = (said["logits"].argmax(2) != said["labels"]).float().mean(1)
    promised = torch.tensor([stage["error"] for stage in run.results["stages"]])
    chosen = len(said["labels"]) / run.results["n"]  # of all test images; outputs are kept in float16
    torch.testing.assert_close(wrong, promised, rtol=0, atol=5e-4 if chosen == 1 else 0.04)
    x = next(iter(run.data(sample=True).test.batches(64)))[0]
    with nestling.Runtime(name, device="cpu") as runtime:
        found = runtime.stop_when_sure(0.005)
        chance = 2 * (2 * 0.05 / found.images) ** 0.5  # two deviations: one image in twenty differs, in both halves
        assert found.error <= found.last_error + 0.005 + chance, "judged on images that had no say"
        least = 0.3 if promised[0] < 0.1 else 0.02  # of 200 things few are told apart surely at once
        assert found.cost < 1 - least / 2 and found.stopped[0] > least
        stages = [answer.stage for answer in runtime.answer_batch(x)]
        assert len(set(stages)) > 1 and stages.count(1) > len(stages) * least


@pytest.mark.parametrize("name", NAMES)
def test_profiling_a_network_measures_it_and_stores_nothing(name: str, tmp_path: Path) -> None:
    before = stamps()
    words = [sys.executable, "-m", "nestling", "profile", name, "--device", "cpu", "--repeats", "10", "--json"]
    words += ["--threads", "1", "--threads", "2", "--batch", "1", "--batch", "2"]
    done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=tmp_path)
    found, run = json.loads(done.stdout), resolve(name)
    conditions = [(each["threads"], each["batch"], each["repeats"]) for each in found["conditions"]]
    assert conditions == [(1, 1, 10), (1, 2, 10), (2, 1, 10), (2, 2, 10)]
    macs = [stage["macs"] for stage in run.results["stages"]]
    for condition in found["conditions"]:
        medians = [stage["median_ms"] for stage in condition["stages"]]
        assert medians[0] > 0 and medians == sorted(medians)
        assert [stage["macs"] for stage in condition["stages"]] == macs
    assert stamps() == before and not list(tmp_path.iterdir())
    shown = profile.show(found)
    assert found["stored"] is False and isinstance(shown, Table) and shown.caption == "nothing is stored"


@pytest.mark.parametrize("name", NAMES)
def test_a_report_is_written_of_a_network(name: str, tmp_path: Path) -> None:
    before, page = stamps(), tmp_path / "report.html"
    found = report.command((name,), out=str(page))
    [family] = found["headline"]
    [line] = family["lines"]
    errors = [stage["error"] for stage in resolve(name).results["stages"]]
    assert [row["error"] for row in line["stages"]] == pytest.approx(errors, abs=5e-4)
    assert "data:image/png" in page.read_text(encoding="utf-8") and stamps() == before


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_images_are_the_first_of_the_real_test_set(name: str) -> None:
    run = resolve(name)
    stored = run.data(sample=True).test
    first, classes = len(stored), len(run.results["classes"])
    assert first == SAMPLES[run.recipe.data.name] and len(stored.labels.unique()) > classes / 2
    shown = run.gallery()
    assert len(shown["images"]) >= 40 and torch.equal(shown["images"], stored.pictures(shown["indices"]))
    assert torch.equal(run.outputs()["labels"][:first], stored.labels)
    try:
        real = load(DataRecipe(name=run.recipe.data.name))
    except NestlingError as error:
        pytest.skip(f"the real images are not here: {error}")
    indices = torch.arange(first)
    assert torch.equal(stored.pictures(indices), real.test.pictures(indices))
    assert torch.equal(stored.labels, real.test.labels[indices])


def test_what_comes_with_us_is_read_and_never_written() -> None:
    before, run = stamps(), resolve(NAMES[0])
    for write in (
        lambda: run.write_json(RESULTS, {}),
        lambda: run.save_tensors(WEIGHTS, {}),
        lambda: run.append_log({"epoch": 1}),
        lambda: run.truncate_log(0),
        lambda: RunDir(run.path).write_provenance("x"),
        run.hold,
        lambda: train_command(resume=NAMES[0]),
    ):
        with pytest.raises(NestlingError, match=rf"{NAMES[0]} comes with nestling and is not changed; copy .* and use"):
            write()
    assert stamps() == before
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) <= SIZE


def test_a_network_by_its_path_is_the_same_one_and_a_path_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve(SHIPPED / NAMES[0]).comes_with_us and resolve(Path(NAMES[0])).path == resolve(NAMES[0]).path
    Path(NAMES[0]).mkdir()
    with pytest.raises(NestlingError, match=r"is not a run folder: it has no recipe.json"):
        resolve(NAMES[0])
    RunDir.create(NAMES[0]).write_recipe(named("digits-width"))
    assert resolve(NAMES[0]).recipe.name == "digits-width" and not resolve(NAMES[0]).comes_with_us


def test_a_damaged_file_of_ours_is_not_evaluated_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("nestling.runs.folder.SHIPPED", tmp_path)
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / RESULTS).write_text("{")
    with pytest.raises(NestlingError, match=r"results.json is not JSON .*; install nestling again"):
        RunDir(tmp_path / "net").read_json(RESULTS)


def test_a_run_is_shipped_as_a_run_folder(tmp_path: Path) -> None:
    recipe = override(named("digits-width"), ["train.epochs=1"])
    train(recipe, str(tmp_path / "run"), quiet=True)
    made = ship(str(tmp_path / "run"), "digits", tmp_path / "shipped")
    run = resolve(made)
    assert {path.name for path in made.path.parent.iterdir()} == {"digits"} and run.recipe == recipe
    rounded = {
        key: value.half() if value.dim() == 4 else value
        for key, value in resolve(tmp_path / "run").net().state_dict().items()
    }
    stored = run.load_tensors(WEIGHTS)[0]
    assert stored.keys() == rounded.keys() and all(torch.equal(stored[key], rounded[key]) for key in rounded)
    x, y = next(iter(run.data().test.batches(2000)))
    with torch.no_grad():
        errors = [float((logits.argmax(1) != y).float().mean()) for logits in run.net()(x)]
    assert [row["error"] for row in run.results["stages"]] == pytest.approx(errors)
    assert run.results["sample"]["errors"] == pytest.approx(errors, abs=1e-6)
    np.testing.assert_array_equal(run.outputs()["labels"], y)
    assert len(run.gallery()["images"]) == len(run.gallery()["indices"])
    with pytest.raises(NestlingError, match="is there already"):
        ship(str(tmp_path / "run"), "digits", tmp_path / "shipped")


def test_a_sample_is_only_for_data_that_has_one(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "run").write_recipe(named("digits-width"))
    with pytest.raises(NestlingError, match="no sample of digits comes with nestling"):
        evaluate.command(str(tmp_path / "run"), sample=True)


def test_a_run_of_ones_own_is_evaluated_on_the_sample_and_keeps_its_results(tmp_path: Path) -> None:
    run = RunDir(tmp_path / NAMES[0])
    run.path.mkdir()
    for path in (SHIPPED / NAMES[0]).iterdir():
        (run.path / path.name).write_bytes(path.read_bytes())
    before = {path: path.read_bytes() for path in run.path.iterdir()}
    found = evaluate.command(str(run.path), device="cpu", sample=True)
    assert found["n"] == FIRST and found["stored"] is False
    assert {path: path.read_bytes() for path in run.path.iterdir()} == before
    run.write_json(RESULTS, {})
    assert run.read_json(RESULTS) == {}, "a copy is one's own"


def test_a_network_is_exported_in_8_bits_without_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample that comes along is enough: what calibrates does not judge."""
    monkeypatch.setenv("NESTLING_DATA", str(tmp_path))
    result = export.command(NAMES[0], int8=True, out=str(tmp_path / "out"), images=100)
    price = result["about"]["int8"]
    assert (price["images"], price["calibration_images"]) == (100, 256) and "left out" in str(
        export.show(result).caption
    )
    sample = resolve(NAMES[0]).data(sample=True).test
    pictures, labels = sample.pictures(torch.arange(256, 356)).numpy(), sample.labels[256:356].tolist()
    with nestling.Runtime(tmp_path / "out") as runtime:
        wrong = sum(a.label != label for a, label in zip(runtime.answer_batch(pictures), labels, strict=True))
    assert wrong / 100 == price["error_after"][-1] <= price["error_before"][-1] + 0.05


def test_an_unknown_name_names_the_nearest() -> None:
    for opening in (nestling.load, nestling.Runtime, evaluate.command, profile.command, export.command):
        with pytest.raises(
            NestlingError, match=r"there is no run folder .*come with nestling: .*width-resnet42-cifar10"
        ):
            opening("width-resnet42-cifar")
        with pytest.raises(NestlingError, match=r"did you mean width-resnet42-cifar10"):
            opening("width-resnet42-cifar")


def test_exported_stages_answer_as_their_network_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = export.command(NAMES[0])["folder"]
    pictures = resolve(NAMES[0]).gallery()["images"][:4].numpy()
    with nestling.Runtime(folder) as exported, nestling.Runtime(NAMES[0], device="cpu") as run:
        assert exported.spec == run.spec and exported.device == "cpu"
        for mine, other in zip(exported.answer_batch(pictures), run.answer_batch(pictures), strict=True):
            np.testing.assert_allclose(mine.probabilities, other.probabilities, atol=1e-4)
        with Portable(folder) as portable:
            each = [find_thresholds(runtime._held_out(), 0.005) for runtime in (run, exported, portable)]
            assert each[0] == each[1] == each[2] and each[0].images == 5000
            assert portable.stop_when_sure(0.005).thresholds == portable.thresholds
        name = run.answer(pictures[0]).name
    Image.fromarray(pictures[0].transpose(1, 2, 0)).save("one.png")
    [said] = predict.command(folder, ("one.png",))["images"]
    assert said["answer"]["class"] == name
    with pytest.raises(NestlingError, match="which ONNX Runtime answers on the CPU; found device=cpu, engine=eager"):
        nestling.Runtime(folder, engine="eager")
    with pytest.raises(NestlingError, match="holds exported stages, not a run"):
        evaluate.command(folder)


def test_exported_stages_are_said_to_be_no_run(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(
        NestlingError, match=r"holds exported stages, not a run; nestling predict and nestling.Runtime answer with"
    ):
        nestling.load(tmp_path)


@pytest.mark.parametrize(("name", "least"), [("width-resnet42-cifar10", 87), ("width-resnet18-tiny-imagenet", 45)])
def test_large_pictures_of_the_same_things_are_answered_nearly_as_well(name: str, least: int, tmp_path: Path) -> None:
    """`nestling predict` on test images as JPEG files of 256 x 256: a network that saw whole pictures is shown whole ones."""
    test, classes, files = resolve(name).data(sample=True).test, resolve(name).results["classes"], []
    for index, pixels in enumerate(test.pictures(torch.arange(100)).numpy()):
        files.append(str(tmp_path / f"{index}.jpg"))
        large = Image.fromarray(pixels.transpose(1, 2, 0)).resize((256, 256), Image.Resampling.LANCZOS)
        large.save(files[-1], quality=95)
    said = [each["answer"]["class"] for each in predict.command(name, tuple(files))["images"]]
    assert sum(word == classes[label] for word, label in zip(said, test.labels.tolist(), strict=False)) >= least


def test_networks_of_folders_are_shown_the_part_that_evaluation_showed(tmp_path: Path) -> None:
    for name in ("train", "val"):
        for label in ("a", "b"):
            (tmp_path / "pictures" / name / label).mkdir(parents=True)
            for index in range(4):
                pixels = np.random.default_rng(index).integers(0, 256, (40, 60, 3), np.uint8)
                Image.fromarray(pixels).save(tmp_path / "pictures" / name / label / f"{index}.png")
    root = tmp_path / "pictures"
    changes = ["data.name=folder", f"data.root={root}", "data.size=32", "data.workers=0", "train.device=cpu"]
    changes += ["train.epochs=1", "train.batch=4", "network.widths=4,8,16", "train.precision=float32"]
    run = str(tmp_path / "run")
    train(override(named("cifar10-width"), changes), run, quiet=True)
    picture = root / "val" / "a" / "0.png"
    with nestling.Runtime(run, device="cpu") as runtime:
        assert runtime.spec.part == shown(32) == 32 / 37
        np.testing.assert_array_equal(fitted(picture, (3, 32, 32), part=runtime.spec.part), read(picture, 32).numpy())
    with nestling.Runtime(export.command(run, out=str(tmp_path / "export"))["folder"]) as exported:
        assert exported.spec.part == shown(32)
