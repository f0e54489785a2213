"""Profiles, forecasts, thresholds and predictions of a real run on the digits."""

import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

import nestling
from nestling import nets
from nestling.commands import export, predict, profile, train
from nestling.commands.cli import main
from nestling.data import load, picture_file
from nestling.errors import NestlingError
from nestling.files import OUTPUTS
from nestling.recipes.recipe import NetworkRecipe
from nestling.runs.folder import RunDir
from nestling.runs.latency import WARM_UP, load_profile
from nestling.runs.open import resolve
from nestling.runtime import Abandoned, Pace, Runtime, Stop, confidence
from nestling.runtime.build import build_engine
from nestling.runtime.engine import Floats
from nestling.runtime.forecast import KEPT, Forecast, PastTrail, Recent, survey
from nestling.runtime.news import remember
from nestling.runtime.runtime import spec_of
from nestling.runtime.work import ImageWork, Trail, Work
from nestling.runtime.worker import Worker
from nestling.studies.measure import measure


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "digits"
    train.command("digits-width", out=str(path), set=("train.epochs=4",), quiet=True)
    return path


def shown(table: Any) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


# --- profile -----------------------------------------------------------------------------------------------------


def test_a_profile_is_stored_with_the_run_and_read_by_the_runtime(run: Path) -> None:
    result = profile.command(str(run), repeats=20, batch=(1, 4))
    assert "onnxruntime" in shown(profile.show(result))
    stored = load_profile(RunDir.open(run))
    assert stored.array.shape == (20, 3) and (np.diff(stored.array, axis=1) > 0).all()
    assert (stored.engine, stored.threads, stored.batch) == ("onnxruntime", 1, 1)
    assert [each["batch"] for each in result["conditions"]] == [1, 4]
    for condition in result["conditions"]:
        for row in condition["stages"]:
            assert 0 < row["median_ms"] <= row["p95_ms"] <= row["p99_ms"] and row["macs"] > 0
    with Runtime(run, device="cpu") as runtime:
        assert runtime.profile == stored
        assert sum(runtime.pace.base) == pytest.approx(stored.median()[-1] / 1e3)
        shares, error = runtime.forecast(10.0)
        assert shares == [0, 0, 0, 1] and error == pytest.approx(runtime.spec.errors[-1])
        shares, error = runtime.forecast(0.0)
        assert shares == [1, 0, 0, 0] and error == pytest.approx(1 - max(runtime.spec.prior))
    with Runtime(run, device="cpu", engine="eager") as other:
        assert other.profile is None  # measured with another engine


def test_more_threads_are_measured_in_a_process_of_their_own(run: Path) -> None:
    result = profile.command(str(run), repeats=5, threads=(1, 2), dry=True)
    assert [each["threads"] for each in result["conditions"]] == [1, 2]


class Ticks:
    """A clock that reads 0, 1, 2, ... seconds."""

    def __init__(self) -> None:
        self.time = -1.0

    def __call__(self) -> float:
        self.time += 1
        return self.time


def test_the_clock_is_read_once_before_the_stages_and_once_after_each() -> None:
    net, clock = nets.build(NetworkRecipe("width-digits")), Ticks()
    engine = build_engine(net, "cpu", "eager")
    found = measure(engine, net, np.zeros((3, 1, 8, 8), np.float32), repeats=4, batch=2, clock=clock)
    assert found.trace == ((1000.0, 2000.0, 3000.0),) * 4
    assert clock.time + 1 == (WARM_UP + 4) * (1 + 3)
    assert found.macs == tuple(net.plan.macs(stage) for stage in (1, 2, 3))


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"threads": (0,)}, {"batch": (-1,)}])
def test_nonsense_is_refused(run: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(NestlingError, match="at least 1"):
        profile.command(str(run), **wrong)


def test_the_example_runs(run: Path) -> None:
    root = Path(__file__).parent.parent
    words = [sys.executable, str(root / "examples" / "frames.py"), str(run), "--frames", "40"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "% right" in done.stdout and done.stdout.count("answered") == 4


# --- forecast ----------------------------------------------------------------------------------------------------


def test_forecast_by_hand() -> None:
    forecast = Forecast([[1, 2], [1, 4], [2, 5], [3, 3]], errors=[0.2, 0.1], prior_error=0.9)
    assert forecast.shares(0.5).tolist() == [1, 0, 0]
    assert forecast.shares(2).tolist() == [0.25, 0.5, 0.25]
    assert forecast.error(2) == pytest.approx(0.25 * 0.9 + 0.5 * 0.2 + 0.25 * 0.1)
    assert forecast.shares(4, slowdown=2).tolist() == forecast.shares(2).tolist()


@given(st.integers(0, 1000), st.floats(0, 5), st.floats(0.1, 3))
def test_more_time_is_never_expected_to_be_worse(seed: int, deadline: float, more: float) -> None:
    trace = np.random.default_rng(seed).exponential(size=(30, 3)).cumsum(axis=1)
    forecast = Forecast(trace, [0.3, 0.2, 0.1], 0.9)
    assert forecast.error(deadline + more) <= forecast.error(deadline) + 1e-12
    assert forecast.shares(deadline).sum() == pytest.approx(1)


def test_questions_that_were_given_up_count_up_to_then() -> None:
    """Three cases: done after 1, given up after 2, done after 3. Of the two left after 1 one is followed to its end."""
    times, ended = np.array([1, np.inf, 3.0]), np.array([np.inf, 2.0, np.inf])
    limits = np.array([0.5, 1, 2.5, 3])
    found = survey(times, ended, limits, profile=np.array([100.0]))
    np.testing.assert_allclose(found, [0, 1 / 3, 1 / 3, 1])
    times, ended = np.array([1, np.inf, np.inf]), np.array([np.inf, 2.0, 4.0])
    found = survey(times, ended, np.array([3, 4, 6, 9]), profile=np.array([5.0, 7, 8, 3]))
    np.testing.assert_allclose(found, [1 / 3, 1 / 3, 1 - 2 / 3 * 2 / 3, 1])  # after 4 as in the profile


@given(st.integers(0, 1000), st.floats(0.5, 4))
def test_a_forecast_learns_from_questions_with_deadlines(seed: int, slower: float) -> None:
    """The machine spreads as no slow-down tells; the profile is wrong, and after some hundred questions it is forgotten."""
    chance = np.random.default_rng(seed)
    recent = Recent()
    forecast = Forecast([[1.0, 2.0]], [0.2, 0.1], 0.9, recent)
    for _ in range(500):
        done = np.cumsum(chance.exponential(slower, 2))
        limit = chance.uniform(0.2, 4) * slower
        recent.add([float(v) for v in done if v <= limit], limit, slowdown=1.1)
    truth = np.cumsum(chance.exponential(slower, (20_000, 2)), axis=1)
    for limit in (0.5 * slower, 1.5 * slower, 3 * slower):
        expected = [(truth[:, 0] > limit).mean(), (truth[:, 1] > limit).mean() - (truth[:, 0] > limit).mean()]
        np.testing.assert_allclose(forecast.shares(limit)[:2], expected, atol=0.12)
        assert forecast.shares(limit).sum() == pytest.approx(1)
    assert forecast.shares(1.5 * slower, slowdown=4).tolist() == Forecast([[1.0, 2.0]]).shares(1.5 * slower, 4).tolist()


@pytest.fixture
def worker() -> Iterator[Worker]:
    """One that is asked nothing: only what it remembers counts here."""
    found = Worker(Nothing(), Pace(stages=2), keep=1, clock=lambda: 0.0)
    yield found
    found.close()


class Nothing:
    name, stages, row_bytes, most, stops, jumps, places = "nothing", 2, 1, 0, True, False, 1

    def start(self, x: Floats) -> None: ...

    def step(self, stage: int, state: None, stop: Stop) -> tuple[Floats, None]:
        raise Abandoned

    def take(self, state: None, rows: Sequence[int]) -> None: ...

    def close(self) -> None: ...


def went(worker: Worker, done: list[float], now: float, due: float) -> PastTrail:
    """What is remembered of a question asked at 100 whose caller looked at `due`; the worker let it go at `now`."""
    row = ImageWork(100.0 + due)
    row.trail = Trail(100.0, 1.0)
    row.trail.done += [100.0 + at - 100.0 for at in done]  # rounded as on a clock
    remember(row, 100.0 + now, worker.recent)
    assert row.trail is None
    return worker.recent.trails[-1]


def test_a_question_counts_until_its_caller_looked(worker: Worker) -> None:
    assert went(worker, [1.0], now=5.0, due=4.0) == ((1.0,), 4.0, 1.0, 1)  # noticed later that it was called off
    assert went(worker, [1.0, 3.0], now=3.0, due=4.0) == ((1.0, 3.0), 3.0, 1.0, 1)  # to the last stage, in time
    assert went(worker, [1.0, 5.0], now=5.0, due=4.0) == ((1.0,), 4.0, 1.0, 1)  # the last stage was done for nobody
    assert went(worker, [5.0], now=6.0, due=4.0) == ((), 4.0, 1.0, 1)  # and so was the first
    assert went(worker, [1.0], now=1.5, due=4.0) == ((1.0,), 1.5, 1.0, 1)  # closed or cancelled before its time


def test_a_question_counts_although_its_time_was_up_before_it_was_queued(worker: Worker) -> None:
    """A busy machine may stop whoever asks at any moment; forgetting these would make the machine look faster."""
    for asked, due in ((-2.0, -0.5), (-2.0, -2.0)):  # it is 0 now; the second was asked with a deadline of 0
        row = ImageWork(due)
        row.trail = Trail(asked, 1.0)
        worker.submit(Work([row], np.zeros((1, 1, 1, 1), np.float32)))
    assert list(worker.recent.trails) == [((), 1.5, 1.0, 1)]


def test_stages_done_after_their_time_do_not_make_stages_look_fast(worker: Worker) -> None:
    """Stages go on for a while after the caller has looked, as on a machine that is not busy. Who counted the ones that are
    done then, and the others only until the caller looked, would count the fast ones alone."""
    chance = np.random.default_rng(0)
    limits = np.array([0.5, 1.0, 1.5])
    found = []
    for _ in range(12):
        for time, due in zip(chance.exponential(size=KEPT), chance.uniform(0.2, 2, KEPT), strict=True):
            stopped = due + 0.5  # somebody else asked
            went(worker, [float(time)] if time <= stopped else [], now=min(time, stopped), due=float(due))
        times, ended = worker.recent.alike(1.0, 2)
        found.append(survey(times[:, 0], ended, limits, np.array([1.0])))
    np.testing.assert_allclose(np.mean(found, axis=0), 1 - np.exp(-limits), atol=0.02)


def test_a_runtime_remembers_how_questions_went(run: Path) -> None:
    with Runtime(run, device="cpu") as runtime:
        runtime.worker.recent.trails.clear()
        image = np.zeros(runtime.spec.shape, np.float32)
        runtime.answer(image, deadline=10.0)
        for _ in range(50):
            runtime.timeline(image)  # measuring does not count
        runtime.answer_batch(np.stack([image, image]), deadline=10.0)  # nor do batches
        [(done, ended, slowdown, first)] = runtime.worker.recent.trails
        assert first == 3  # ten seconds are enough to begin with all of it
        assert len(done) == 3 and list(done) == sorted(done) and ended >= done[-1] and slowdown > 0
        for _ in range(50):
            runtime.answer(image)
        assert [len(done) for done, _, _, _ in runtime.worker.recent.trails] == [
            3
        ] * 51  # each there when it is answered


# --- confidence --------------------------------------------------------------------------------------------------


def toy(seed: int, images: int = 400) -> tuple[Any, Any]:
    """Stages that get better and are surer where they are right."""
    chance = np.random.default_rng(seed)
    labels = chance.integers(0, 5, images)
    logits = chance.normal(size=(3, images, 5)).astype(np.float32)
    for stage, gain in enumerate((1.5, 2.5, 4.0)):
        logits[stage, np.arange(images), labels] += gain
    return logits, labels


@given(st.integers(0, 1000), st.sampled_from([0.0, 0.01, 0.05]))
def test_thresholds_keep_the_loss_on_the_images_they_were_chosen_on(seed: int, loss: float) -> None:
    logits, labels = toy(seed)
    found = confidence.calibrate(logits, labels, loss, costs=[1, 2, 5])
    half = 200
    sure, right = confidence.softmax(logits).max(axis=2), logits.argmax(axis=2) == labels
    chosen = confidence.judge(sure[:, :half], right[:, :half], found.thresholds, loss, np.array([1.0, 3.0, 8.0]))
    assert chosen.error <= chosen.last_error + loss + 1e-9
    assert found.images == half and sum(found.stopped) == pytest.approx(1)
    assert found.cost == pytest.approx((found.stopped[0] * 1 + found.stopped[1] * 3 + found.stopped[2] * 8) / 8)


@given(st.integers(0, 100))
def test_more_loss_allowed_never_costs_more(seed: int) -> None:
    logits, labels = toy(seed)
    sure, right = confidence.softmax(logits).max(axis=2), logits.argmax(axis=2) == labels
    spent = np.array([1.0, 3.0, 8.0])
    costs = []
    for loss in (0.0, 0.02, 0.3):
        thresholds = confidence.choose(sure, right, loss, spent)
        costs.append(confidence.judge(sure, right, thresholds, loss, spent).cost)
    assert costs[0] >= costs[1] - 0.02 and costs[1] >= costs[2] - 0.02  # up to the grid


def test_the_runtime_does_what_the_calibration_promised(run: Path) -> None:
    tensors, _ = RunDir.open(run).load_tensors(OUTPUTS)
    with Runtime(run, device="cpu") as runtime:
        found = runtime.stop_when_sure(0.02)
        from nestling.data import load
        from nestling.recipes.recipe import DataRecipe

        images = torch.cat([x for x, _ in load(DataRecipe(name="digits")).test.batches(100)])
        half = len(images) // 2
        answers = runtime.answer_batch(images[half:])
        stops = np.bincount([answer.stage for answer in answers], minlength=4)[1:] / len(answers)
        np.testing.assert_allclose(stops, found.stopped, atol=0.02)
        wrong = np.mean([a.label != int(y) for a, y in zip(answers, tensors["labels"][half:], strict=True)])
        assert wrong == pytest.approx(found.error, abs=0.01)
        assert all(answer.final for answer in answers)


@pytest.mark.parametrize(
    ("logits", "labels", "loss"),
    [(np.zeros((3, 4)), np.zeros(4), 0.1), (np.zeros((3, 4, 2)), np.zeros(5), 0.1), (np.zeros((3, 4, 2)), np.zeros(4), -1),
     (np.zeros((3, 1, 2)), np.zeros(1), 0.1)],
)  # fmt: skip
def test_bad_calibration_data_is_refused(logits: Any, labels: Any, loss: float) -> None:
    with pytest.raises(NestlingError):
        confidence.calibrate(logits, labels, loss)


# --- predict -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Four test digits as files: of the network's size, larger, and in colour."""
    from nestling.recipes.recipe import DataRecipe

    folder, test = tmp_path_factory.mktemp("pictures"), load(DataRecipe(name="digits")).test
    for i, pixels in enumerate(test.pictures(torch.arange(4))):
        picture = Image.fromarray(pixels[0].numpy())
        picture = picture.resize((64, 64)) if i == 2 else picture.convert("RGB") if i == 3 else picture
        picture.save(folder / f"{i}.png")
    return folder, test.labels[:4].tolist()


def test_predictions_of_files_and_folders(run: Path, pictures: tuple[Path, list[int]]) -> None:
    folder, labels = pictures
    tensors, _ = RunDir.open(run).load_tensors(OUTPUTS)
    result = predict.command(str(run), (str(folder),), device="cpu")
    assert [Path(each["image"]).name for each in result["images"]] == ["0.png", "1.png", "2.png", "3.png"]
    for i in (0, 1, 3):  # the very pixels of the data set
        for stage, said in enumerate(result["images"][i]["stages"]):
            expected = tensors["logits"][stage, i].softmax(0).numpy()
            np.testing.assert_allclose(said["probabilities"], expected, atol=1e-4)
    assert all(len(each["stages"]) == 3 and each["answer"]["final"] for each in result["images"])
    text = shown(predict.show(result))
    assert "stage 3 w4" in text and "█" in text and len(labels) == 4


def test_a_loss_or_a_name_that_would_be_passed_over_is_refused(run: Path) -> None:
    for loss in (-0.3, float("nan"), 1.0):
        with pytest.raises(NestlingError, match="expected a share of accuracy"):
            predict.command(str(run), ("x.png",), device="cpu", loss=loss)
    with pytest.raises(NestlingError, match="an empty name"):  # would be every picture below the folder we are in
        predict.command(str(run), ("",), device="cpu")


def test_predict_by_a_deadline_on_the_command_line(
    run: Path, pictures: tuple[Path, list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    picture = str(pictures[0] / "0.png")
    assert main(["predict", str(run), picture, "--deadline-ms", "0.0001", "--device", "cpu", "--json"]) == 0
    [answer] = json.loads(capsys.readouterr().out)["images"]
    assert answer["stages"] == [] and answer["answer"] is None
    assert main(["predict", str(run), picture, "--deadline-ms", "0.0001", "--device", "cpu"]) == 0
    assert "no answer: no stage was done by the deadline" in capsys.readouterr().out
    assert main(["predict", str(run), picture, "--deadline-ms", "2000", "--loss", "0.05", "--device", "cpu"]) == 0
    assert "stage 1" in capsys.readouterr().out


# What a camera stores, by the number it writes beside it: how it was held
HELD: dict[int, Callable[[Any], Any]] = {
    1: lambda seen: seen,
    2: np.fliplr,
    3: lambda seen: np.rot90(seen, 2),
    4: np.flipud,
    5: lambda seen: seen.swapaxes(0, 1),
    6: lambda seen: np.rot90(seen, 1),
    7: lambda seen: np.rot90(seen.swapaxes(0, 1), 2),
    8: lambda seen: np.rot90(seen, -1),
}


def photograph(path: Path, seen: Any, held: int, **options: Any) -> Path:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = held, "maker"
    Image.fromarray(np.ascontiguousarray(HELD[held](seen))).save(path, exif=exif, **options)
    return path


@pytest.mark.parametrize("size", [(8, 8), (40, 30)])  # the network's own, and one that is cut and scaled
def test_pictures_are_seen_as_they_were_taken(
    run: Path, tmp_path: Path, size: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    digit = Image.fromarray(load(RunDir.open(run).read_recipe().data).test.pictures(torch.arange(1))[0, 0].numpy())
    seen = np.array(digit.resize(size))
    paths = [photograph(tmp_path / f"{held}.png", seen, held) for held in HELD]
    assert main(["predict", str(run), *map(str, paths), "--device", "cpu", "--json"]) == 0
    upright, *others = (image["answer"]["probabilities"] for image in json.loads(capsys.readouterr().out)["images"])
    for other in others:
        np.testing.assert_allclose(other, upright, atol=1e-6)
    Image.open(paths[5]).save(tmp_path / "untold.png", exif=b"")  # held sideways, and it does not say so
    [untold] = predict.command(str(run), (str(tmp_path / "untold.png"),), device="cpu")["images"]
    assert np.abs(np.subtract(untold["answer"]["probabilities"], upright)).max() > 0.01


@pytest.mark.parametrize(
    ("good", "spoilt", "turned"),
    [
        (b"\x01\x0f", b"\x01\x00", True),  # another entry than the one that counts: a name where a width should be
        (b"MM\x00*", b"MM\x00\x00", False),  # all of it: as stored, then
    ],
)
def test_spoilt_exif_spoils_no_picture(tmp_path: Path, good: bytes, spoilt: bytes, turned: bool) -> None:
    seen = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    path = photograph(tmp_path / "photo.webp", seen, held=6, lossless=True)
    whole = path.read_bytes()
    at = whole.index(b"MM\x00*")
    path.write_bytes(whole[:at] + whole[at:].replace(good, spoilt, 1))
    expected = seen if turned else HELD[6](seen)
    np.testing.assert_array_equal(picture_file.fitted(path, (3, 8, 8)).transpose(1, 2, 0), expected)


@pytest.mark.parametrize("form", [["--json"], []])  # for programs, and for people
def test_broken_pictures_are_named_and_the_others_answered(
    run: Path, pictures: tuple[Path, list[int]], tmp_path: Path, form: list[str]
) -> None:
    folder, broken = tmp_path / "some [/] pictures", ("1-cut.png", "2-text.png", "4-gone.png")
    shutil.copytree(pictures[0], folder)
    whole = (folder / "2.png").read_bytes()
    (folder / broken[0]).write_bytes(whole[: len(whole) // 2])
    (folder / broken[1]).write_text("no picture")
    (folder / broken[2]).symlink_to(tmp_path / "nowhere.png")
    (folder / "folder.png").mkdir()
    (folder / "._2.png").write_bytes(b"what macOS keeps beside 2.png")
    words = [sys.executable, "-m", "nestling", "predict", str(run), str(folder), "--device", "cpu", *form]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "300"})
    assert done.returncode == 1
    *named, count = done.stderr.splitlines()
    assert count == "nestling: 3 of 7 files or folders cannot be read as pictures; repair them or leave them out"
    for line, name in zip(named, broken, strict=True):
        assert line.startswith(f"{folder / name} cannot be read as a picture (")
    if form:
        images = json.loads(done.stdout)["images"]
        assert [image["error"] for image in images if "error" in image] == named
        answered = [image for image in images if "error" not in image]
        assert answered == sorted(answered, key=lambda image: str(image["image"])) and len(answered) == 4
        assert all(image["answer"]["final"] and len(image["stages"]) == 3 for image in answered)
    else:
        lines = [line.strip() for line in done.stdout.splitlines()]
        assert not [line for line in lines if "cannot be read" in line], "it was said already"
        assert all(str(folder / f"{i}.png") in lines for i in range(4)) and done.stdout.count("stage 3 w4") == 4


def test_a_missing_picture_is_named_and_the_others_answered(
    run: Path, pictures: tuple[Path, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, missing, last = str(pictures[0] / "0.png"), str(tmp_path / "none.png"), str(pictures[0] / "1.png")
    assert main(["predict", str(run), first, missing, last, "--device", "cpu", "--json"]) == 1
    out, err = capsys.readouterr()
    images = json.loads(out)["images"]
    assert [image["image"] for image in images] == [first, missing, last]
    assert ["answer" in image for image in images] == [True, False, True]
    said = f"there is no picture {missing}; name files or folders"
    assert err.splitlines().count(said) == 1 and json.loads(out)["error"].startswith("1 of 3 files or folders cannot")
    assert main(["predict", str(run), first, missing, missing, "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert (out + err).count(said) == 1


def test_a_missing_picture_is_named_before_the_network_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(tmp_path / "no run"), str(tmp_path / "none.png")]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("there is no picture") and "there is no run folder" in second


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n0 0 8 8 rectfill\nshowpage\n%%EOF\n"


def test_only_files_of_formats_we_name_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they are called: Pillow would hand PostScript to Ghostscript."""
    from PIL import EpsImagePlugin

    ran: list[Any] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *words, **options: ran.append(words))
    (tmp_path / "a.png").write_bytes(POSTSCRIPT)
    os.mkfifo(tmp_path / "b.png")
    for name in ("a.png", "b.png"):
        with pytest.raises(picture_file.Unreadable):
            picture_file.fitted(tmp_path / name, (3, 8, 8))
    assert not ran


def test_a_small_file_with_many_pixels_is_refused_before_they_take_memory(tmp_path: Path) -> None:
    side = math.isqrt(picture_file.MOST_PIXELS) + 1
    Image.new("1", (side, side)).save(tmp_path / "bomb.png")
    Image.open(tmp_path / "bomb.png").convert("RGB").resize((8, 8)).save(tmp_path / "small.png")
    assert (tmp_path / "bomb.png").stat().st_size < 100_000
    tracemalloc.start()
    with pytest.raises(
        picture_file.Unreadable, match=f"it has {side} x {side} pixels, more than 67,108,864; scale it down"
    ):
        picture_file.fitted(tmp_path / "bomb.png", (3, 8, 8))
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert picture_file.fitted(tmp_path / "small.png", (3, 8, 8)).shape == (3, 8, 8)


def test_deep_pixels_are_scaled_or_refused_and_never_cut_off(tmp_path: Path) -> None:
    """Of a TIFF Pillow gives 12 bits as 16, nearly black, and 16 bits whose white is zero as a negative."""
    grey = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    (tmp_path / "a.pgm").write_bytes(b"P5 8 8 65535\n" + grey.astype(">u2").tobytes())
    Image.fromarray(grey).save(tmp_path / "a.tif")
    for name in ("a.pgm", "a.tif"):
        np.testing.assert_array_equal(picture_file.fitted(tmp_path / name, (1, 8, 8))[0], grey >> 8)
    for bits, white, says in ((12, 1, "a TIFF of 12 bits"), (16, 0, "a TIFF whose white is zero")):
        (tmp_path / "b.tif").write_bytes(tiff(bytes(8 * 8 * bits // 8), bits, white))
        with pytest.raises(picture_file.Unreadable, match=says):
            picture_file.fitted(tmp_path / "b.tif", (1, 8, 8))
    (tmp_path / "b.tif").write_bytes(tiff(bytes([200] * 64), 8, 0))
    assert (picture_file.fitted(tmp_path / "b.tif", (1, 8, 8)) == 55).all()  # 8 bits Pillow turns round itself


def tiff(pixels: bytes, bits: int, photometric: int) -> bytes:
    """A grey TIFF of 8 x 8 pixels; photometric 0: white is zero."""
    tags = {256: 8, 257: 8, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 8, 279: len(pixels)}
    entries = b"".join(struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<I", 8 + len(pixels)) + pixels + struct.pack("<H", len(tags)) + entries + bytes(4)


@pytest.mark.parametrize("form", ["png", "jpg", "bmp", "gif", "webp", "tif", "ppm"])
def test_every_format_that_is_named_is_read(tmp_path: Path, form: str) -> None:
    Image.new("RGB", (16, 16), (200, 100, 50)).save(tmp_path / f"x.{form}")
    found = picture_file.fitted(tmp_path / f"x.{form}", (3, 8, 8)).reshape(3, -1).mean(axis=1)
    np.testing.assert_allclose(found, (200, 100, 50), atol=4)


def test_a_folder_without_pictures_is_named_and_the_others_answered(
    run: Path, pictures: tuple[Path, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "notes.txt").write_text("no picture")
    assert main(["predict", str(run), str(empty), str(pictures[0]), "--device", "cpu", "--json"]) == 1
    out, err = capsys.readouterr()
    first, *others = json.loads(out)["images"]
    assert first["image"] == str(empty) and len(others) == 4 and all("answer" in image for image in others)
    assert first["error"].startswith(f"the folder {empty} holds no pictures (.bmp, ") and first["error"] in err
    assert predict.command(str(run), (str(empty),), device="cpu")["incomplete"].startswith("1 of 1 ")


def test_what_cannot_be_asked_for_is_refused(run: Path) -> None:
    with pytest.raises(NestlingError, match="no picture was named"):
        predict.command(str(run), (), device="cpu")
    for threads in (-1, 2000):
        with pytest.raises(NestlingError, match=f"threads={threads}; expected how many threads .* or 0 for all cores"):
            predict.command(str(run), ("none.png",), device="cpu", threads=threads)


def test_a_run_answers_where_its_data_are_not(pictures: tuple[Path, list[int]], tmp_path: Path) -> None:
    """Shape, classes and normalisation come with the run: it is asked on other machines than it was trained on."""
    folder, run = pictures[0], tmp_path / "run"
    for part in ("train", "val"):
        for name in ("dark", "light"):
            (tmp_path / "own" / part / name).mkdir(parents=True)
            for path in folder.glob("*.png"):
                (tmp_path / "own" / part / name / path.name).write_bytes(path.read_bytes())
    settings = ("data.name=folder", f"data.root={tmp_path / 'own'}", "data.size=16", "data.workers=0", "train.epochs=1")
    train.command("digits-width", out=str(run), set=(*settings, "train.batch=4"), quiet=True)
    there = predict.command(str(run), (str(folder),), device="cpu")
    spec = spec_of(resolve(run), resolve(run).net())
    assert spec.prior == (0.5, 0.5)
    x = torch.rand(2, 3, 16, 16)
    expected = nestling.load(str(run))(x)
    (tmp_path / "own").rename(tmp_path / "elsewhere")
    net = nestling.load(str(run))
    assert net.plan.input.size == (16, 16) and not net.training
    for logits, before in zip(net(x), expected, strict=True):
        torch.testing.assert_close(logits, before, rtol=0, atol=0)
    elsewhere = predict.command(str(run), (str(folder),), device="cpu")
    said = [[image["answer"]["probabilities"] for image in result["images"]] for result in (there, elsewhere)]
    assert said[0] == said[1]
    assert spec_of(resolve(run), resolve(run).net()) == spec
    assert len(profile.command(str(run), device="cpu", repeats=3)["stages"]) == 3
    assert export.command(str(run))["about"]["verified"]["images"] > 0
    with pytest.raises(NestlingError, match=r"there is no folder .*/own; data.root must hold"):
        export.command(str(run), int8=True)  # is calibrated on training images
    results = RunDir.open(run).read_json("results.json")
    RunDir.open(run).write_json("results.json", {key: value for key, value in results.items() if key != "shape"})
    with pytest.raises(NestlingError, match=r"there is no folder .*/own; data.root must hold"):  # rather than a guess
        nestling.load(str(run))
    (tmp_path / "elsewhere").rename(tmp_path / "own")
    assert nestling.load(str(run)).plan.input.size == (16, 16)


def test_load_gives_the_network_of_a_run(run: Path) -> None:
    tensors, _ = RunDir.open(run).load_tensors(OUTPUTS)
    x, _ = next(iter(load(RunDir.open(run).read_recipe().data).test.batches(8)))
    with torch.no_grad():
        *_, last = nestling.load(str(run)).answers(x)
    assert torch.allclose(last, tensors["logits"][-1, :8], atol=1e-4)


def test_a_run_is_timed_without_the_folder_of_its_teacher(tmp_path: Path) -> None:
    few = ("train.epochs=1", "data.limit=128", "train.device=cpu")
    teacher, taught = str(tmp_path / "teacher"), str(tmp_path / "taught")
    train.command("digits-width", out=teacher, set=(*few, "network.alone=3"), quiet=True)
    train.command("digits-width", out=taught, set=(*few, f"train.teacher={teacher}", "train.distill=0.5"), quiet=True)
    assert profile.command(taught, repeats=2)["teacher"]["median_ms"] > 0
    shutil.rmtree(teacher)
    assert "teacher" not in profile.command(taught, repeats=2)
