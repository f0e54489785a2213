"""Training and its device: numbers that come home late change nothing, what a chip cannot do is said and gone without,
missing memory is explained, and the start is told step by step."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from test_train import digits, untimed, weights

from nestling import errors
from nestling.commands.cli import main
from nestling.commands.evaluate import command as evaluate_command
from nestling.data import MemorySplit, load
from nestling.errors import NestlingError
from nestling.gradients.combiners import OSGD
from nestling.kernels import Fused
from nestling.nets import build
from nestling.recipes.recipe import DataRecipe, NetworkRecipe, Recipe, TrainRecipe, override
from nestling.runs import evaluate
from nestling.runs.device import pick_device
from nestling.runs.folder import RunDir
from nestling.train import Training, progress, stepping, train, train_side_by_side
from nestling.train.capabilities import able, lacks_memory, memory_explained
from nestling.train.ended import Ended, Moment, leaving_together
from nestling.train.loop import make_optimizer
from nestling.train.progress import Startup
from nestling.train.step import Step
from nestling.train.tasks import Tasks

# --- numbers that come home late ----------------------------------------------------------------------------------


def go_ahead(monkeypatch: pytest.MonkeyPatch, late: int) -> list[tuple[int, int]]:
    """Let runs on the CPU queue epochs ahead as runs on a GPU do: numbers are copies, and come home only after `late`
    further steps. Returns the list of (epoch recorded, epochs begun by then), filled as runs go on."""
    noted: list[tuple[int, int]] = []

    class Late(Moment):
        asked = 0

        def reached(self) -> bool:
            self.asked += 1
            return self.asked > late

    record, close = Training.record, Training.close
    begun: list[int] = []

    def noting_close(self: Training, epoch: int, rate: float, began: Moment, losses: torch.Tensor) -> Ended:
        begun.append(epoch)
        return close(self, epoch, rate, began, losses)

    def noting_record(self: Training, ended: Ended) -> None:
        noted.append((ended.epoch, len(begun)))
        record(self, ended)

    monkeypatch.setattr(stepping, "kind", lambda recipe, device, split: "graph")
    monkeypatch.setattr(
        stepping, "start", lambda name, step, split, batch, startup=None: stepping.Eager(step, split, batch)
    )
    monkeypatch.setattr("nestling.train.loop.leaving", lambda tensor: tensor.detach().clone())
    monkeypatch.setattr("nestling.train.loop.Moment", Late)
    monkeypatch.setattr(Training, "record", noting_record)
    monkeypatch.setattr(Training, "close", noting_close)
    return noted


QUICK = ("train.epochs=4", "train.average=0.9", "train.evaluate_every=2", "train.compile=false")


@pytest.mark.parametrize("late", [0, 2, 1000])
def test_late_numbers_make_the_same_log_checkpoint_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    recipe = digits(*QUICK)
    results = train(recipe, str(tmp_path / "waits"), quiet=True)
    noted = go_ahead(monkeypatch, late)
    assert train(recipe, str(tmp_path / "ahead"), quiet=True) == results
    assert untimed(tmp_path / "waits") == untimed(tmp_path / "ahead")
    first, second = weights(tmp_path / "waits"), weights(tmp_path / "ahead")
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert [epoch for epoch, _ in noted] == [0, 1, 2, 3], "each epoch once, in order"
    assert [begun for _, begun in noted[:3]] == [1, 2, 3], "an epoch is written before the next but one begins"


def test_a_checkpoint_holds_the_weights_of_its_own_epoch_though_the_next_had_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of an epoch and resumed, a run that queues ahead ends like one that was never stopped."""
    recipe = digits(*QUICK)
    train(recipe, str(tmp_path / "whole"), quiet=True)
    with monkeypatch.context() as patched:
        go_ahead(patched, late=1)
        stopped = Training(recipe, RunDir.create(tmp_path / "parts"))
        stopped.run.write_recipe(recipe)
        for epoch, index in stopped.epochs():
            if (epoch, index) == (2, 2):  # the second epoch was recorded while the third was going on
                break
        assert stopped.done == 2
    train(recipe, str(tmp_path / "parts"), resume=True, quiet=True)
    assert untimed(tmp_path / "whole") == untimed(tmp_path / "parts")
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_nan_is_refused_late_and_the_log_ends_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_ahead(monkeypatch, late=1000)
    with pytest.raises(NestlingError, match="became"):
        train(digits(*QUICK, "train.lr=1e30"), str(tmp_path / "run"), quiet=True)
    assert RunDir(tmp_path / "run").read_log() == [] and not RunDir(tmp_path / "run").has("checkpoint.safetensors")


def test_what_an_epoch_changes_waits_in_the_lane_for_the_epoch_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new order of priorities that did not would reach steps of the last epoch that are still queued."""
    inside = [False]
    noted: list[tuple[int, bool]] = []

    @contextmanager
    def lane(self: stepping.Eager) -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    monkeypatch.setattr(stepping.Eager, "lane", lane)
    monkeypatch.setattr(Step, "begin", lambda self, epoch: noted.append((epoch, inside[0])))
    train(digits("train.epochs=2"), str(tmp_path / "run"), quiet=True)
    assert noted == [(0, True), (1, True)]


def test_weights_that_broke_at_the_last_step_of_an_epoch_are_not_saved(tmp_path: Path) -> None:
    recipe = digits("train.epochs=2")
    run = RunDir.create(tmp_path / "run")
    run.write_recipe(recipe)
    training = Training(recipe, run)
    steps = training.epochs()
    with pytest.raises(
        NestlingError, match=r"is no finite number any more after epoch 2; the checkpoint of epoch 1 is"
    ):
        for epoch, index in steps:
            if (epoch, index + 1) == (1, training.steps):  # the loss of this step is known and fine
                next(iter(training.net.parameters())).data[0] = float("inf")
    assert run.load_checkpoint()[1]["epoch"] == 1


def test_time_that_is_up_writes_what_was_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_ahead(monkeypatch, late=1000)
    assert train(digits(*QUICK), str(tmp_path / "run"), quiet=True, seconds=0) == {}
    run = RunDir(tmp_path / "run")
    assert len(run.read_log()) == 1 and run.load_checkpoint()[1]["epoch"] == 1


def test_tensors_that_leave_together_arrive_as_they_were() -> None:
    tensors = {
        "weight": torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        "count": torch.tensor(7),
        "bias": torch.randn(5),
        "view": torch.randn(6, 6)[1:3, ::2],
    }
    home = leaving_together(tensors)
    assert list(home) == list(tensors)
    assert all(torch.equal(home[name], tensor) and home[name].dtype == tensor.dtype for name, tensor in tensors.items())
    tensors["bias"].zero_()
    assert home["bias"].abs().sum() > 0, "what has left does not change any more"


# --- what a chip can do -------------------------------------------------------------------------------------------


def bf16() -> Recipe:
    return Recipe(name="r", train=TrainRecipe(precision="bfloat16"))


def test_a_new_chip_gives_nothing_up() -> None:
    for chip in ((9, 0), (8, 0)):
        assert able(bf16(), chip=chip, triton=True) == (bf16(), [])


def test_an_old_chip_trains_in_float32_and_uncompiled_and_says_why() -> None:
    found, given_up = able(bf16(), chip=(7, 5), triton=True)
    assert (found.train.precision, found.train.compile) == ("float32", True)
    assert "7.5" in given_up[0] and "float32" in given_up[0]
    found, given_up = able(bf16(), chip=(6, 1), triton=True)
    assert (found.train.precision, found.train.compile) == ("float32", False)
    assert len(given_up) == 2 and "6.1" in given_up[1] and "7.0" in given_up[1]
    eager = override(bf16(), ["train.engine=eager", "train.precision=float32"])
    assert able(eager, chip=(6, 1), triton=False) == (eager, []), "what was not asked for is not missed"
    found, given_up = able(bf16(), chip=(9, 0), triton=False)
    assert not found.train.compile and "Triton is not installed" in given_up[0]


def test_messages_are_said_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_said", set())
    for _ in range(3):
        errors.say_once("training without it, slower")
    assert capsys.readouterr().err == "nestling: training without it, slower\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_cuda_is_refused_and_auto_is_the_cpu() -> None:
    with pytest.raises(NestlingError, match=r"train\.device=cuda, but .*; use train\.device=auto or cpu"):
        pick_device("cuda")
    assert pick_device("auto").type == pick_device("cpu").type == "cpu"
    with pytest.raises(NestlingError, match=r"--device cuda, but .*; use --device auto or cpu"):
        evaluate_command("width-resnet42-cifar10", device="cuda", sample=True)


@pytest.mark.parametrize("wanted", ["tpu", "cuda:99"])
@pytest.mark.parametrize("words", [["evaluate"], ["profile"], ["predict", "picture.png"]], ids=lambda words: words[0])
def test_every_command_refuses_a_device_that_is_not_there(
    words: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = words
    assert main([command, "width-resnet42-cifar10", *rest, "--device", wanted]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"nestling: --device {wanted}") and "auto" in err and "unexpected" not in err


def test_a_gpu_beyond_the_last_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(NestlingError, match="--device cuda:2, but the last CUDA device that torch sees is cuda:1; use"):
        pick_device("cuda:2", "--device ")


def test_a_numbered_cpu_is_the_cpu() -> None:
    assert pick_device("cpu:3") == torch.device("cpu")


@pytest.mark.parametrize("wanted", ["gpu", "mps", "cuda:x", ""])
def test_devices_that_are_none_are_refused(wanted: str) -> None:
    with pytest.raises(NestlingError, match=rf"--device {wanted} is .*; expected auto, cpu or cuda"):
        evaluate_command("width-resnet42-cifar10", device=wanted, sample=True)


def test_a_step_that_cannot_be_compiled_or_captured_is_taken_uncompiled_then_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU a CUDA graph really cannot be had: the run ends as an eager one, and says twice what it went without."""
    recipe = digits("train.average=0.9")
    expected = train(recipe, str(tmp_path / "eager"), quiet=True)
    monkeypatch.setattr(errors, "_said", set())
    monkeypatch.setattr(stepping, "kind", lambda recipe, device, split: "graph")
    found = train(recipe, str(tmp_path / "fallen"), quiet=True)
    assert found == expected
    said = capsys.readouterr().err
    assert said.count("could not be compiled") == 1 and said.count("could not be captured in a CUDA graph") == 1
    with pytest.raises((RuntimeError, AssertionError)):  # asked for by name, a graph is not replaced by something else
        train(override(recipe, ["train.engine=graph"]), str(tmp_path / "asked"), quiet=True)


class Replayed:
    """A CUDA graph without CUDA: replaying does what was captured, which is wrong once the step has another form."""

    form: int
    driver: stepping.Captured

    def replay(self) -> None:
        assert self.form == self.driver.step.form, "a graph of another stage is replayed"
        self.driver._batch()


class GraphOnCPU(stepping.Captured):
    captures = 0

    def _capture(self) -> Any:
        graph: Any = super()._capture()
        graph.driver, graph.form = self, self.step.form
        GraphOnCPU.captures += 1
        return graph


@pytest.mark.parametrize("network", ["width", "depth"])
def test_greedy_is_captured_anew_for_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: str) -> None:
    """Everything of the graph engine but CUDA itself; runs stopped within and between stages go on as one never stopped."""

    def rate_as_tensor(*given: Any) -> torch.optim.Optimizer:
        optimizer = make_optimizer(*given)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"])
        return optimizer

    monkeypatch.setattr("nestling.train.loop.make_optimizer", rate_as_tensor)
    settings = ("strategy.name=greedy", "train.epochs=2", "train.average=0.9")
    recipe = digits(*settings, name=f"digits-{network}")
    train(recipe, str(tmp_path / "eager"), quiet=True)
    queue = SimpleNamespace(synchronize=lambda: None, wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: queue)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: queue)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayed)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(stepping, "Captured", GraphOnCPU)
    monkeypatch.setattr(stepping, "kind", lambda recipe, device, split: "graph")
    GraphOnCPU.captures = 0
    train(recipe, str(tmp_path / "graph"), quiet=True)
    assert GraphOnCPU.captures == 3
    while not RunDir(tmp_path / "parts").has("results.json"):  # stops after every epoch
        train(recipe, str(tmp_path / "parts"), resume=(tmp_path / "parts").exists(), quiet=True, seconds=0)
    eager = weights(tmp_path / "eager")
    for name in ("graph", "parts"):
        found = weights(tmp_path / name)
        assert all(torch.equal(eager[key], found[key]) for key in eager)


def test_kernels_are_cached_where_the_user_says_or_at_home(tmp_path: Path) -> None:
    code = "import os; from nestling.train.capabilities import cache_kernels as cache; print(cache())"
    code += "; print(os.environ['TRITON_CACHE_DIR'])"
    home = {**os.environ, "HOME": str(tmp_path), "TRITON_CACHE_DIR": "/elsewhere"}
    home.pop("TORCHINDUCTOR_CACHE_DIR", None)
    more = code + "; from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())"
    words = subprocess.run([sys.executable, "-c", more], env=home, capture_output=True, text=True, check=True).stdout
    folder, triton, inductor = words.split()
    assert folder == str(tmp_path / ".cache" / "nestling" / "kernels" / f"torch-{torch.__version__}")
    assert triton == "/elsewhere" and inductor == f"{folder}/inductor"


def test_the_environment_is_changed_by_training_and_not_by_importing(tmp_path: Path) -> None:
    code = (
        "import os; before = dict(os.environ)\n"
        "from nestling.commands.train import command\n"
        "print(before == os.environ)\n"
        f"command('digits-width', out={str(tmp_path / 'run')!r}, set=('train.epochs=1',), quiet=True)\n"
        "print(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'])"
    )
    plain = {key: value for key, value in os.environ.items() if key != "CUDA_DEVICE_MAX_CONNECTIONS"}
    done = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "32"]


# --- memory -------------------------------------------------------------------------------------------------------


def test_missing_memory_is_explained() -> None:
    """A petabyte, really asked for."""
    recipe = Recipe(name="r", train=TrainRecipe(batch=4096, device="cpu"))
    with (
        pytest.raises(NestlingError, match="out of memory") as caught,
        memory_explained(recipe, lambda: "Nothing saved is lost.", beside=6),
    ):
        torch.empty(2**50)
    said = str(caught.value)
    for words in ("train.batch=4096", "6 runs side by side", "Nothing saved is lost.", "run fewer", "such as 2048"):
        assert words in said


def test_missing_memory_is_seen_through_other_errors_and_nothing_else_is_taken_for_it() -> None:
    def wrapped(inner: Exception) -> Exception:
        try:
            try:
                raise inner
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")
        except RuntimeError as error:
            return error

    assert lacks_memory(wrapped(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")))
    assert lacks_memory(RuntimeError("CUDA error: out of memory"))
    assert not lacks_memory(wrapped(ValueError("no")))
    with pytest.raises(ValueError, match="no"), memory_explained(bf16(), lambda: ""):
        raise ValueError("no")


@pytest.mark.cuda
@pytest.mark.parametrize("way", ["eager", "graph"])
def test_a_full_gpu_is_explained_and_the_checkpoint_goes_on(tmp_path: Path, way: str) -> None:
    """A real limit on this process's memory, after one epoch without; then without the limit to the end."""
    settings = ["train.epochs=2", "train.device=cuda", f"train.engine={way}", "train.compile=false"]
    recipe = Recipe(name="big", data=DataRecipe(name="synthetic"), network=NetworkRecipe(name="width-resnet42"))
    recipe = override(recipe, [*settings, "train.batch=256"])
    assert train(recipe, str(tmp_path / "run"), quiet=True, seconds=0) == {}
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 2**26) / total)
    try:
        with pytest.raises(NestlingError, match=r"out of memory .*train\.batch=256") as caught:
            train(recipe, str(tmp_path / "run"), resume=True, quiet=True)
        assert "--resume" in str(caught.value)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert train(recipe, str(tmp_path / "run"), resume=True, quiet=True)["stages"]


# --- the start ----------------------------------------------------------------------------------------------------


def test_the_steps_of_a_start_are_told_and_timed() -> None:
    told: list[str] = []
    ticks = iter([0.0, 1.5, 10.0, 12.0, 20.0, 20.5])
    startup = Startup(told.append, clock=lambda: next(ticks))
    for name in ("data", "compile", "data"):
        with startup.step(name):
            pass
    assert told == ["data", "compile", "data"]
    assert startup.seconds == {"data": 2.0, "compile": 2.0}
    assert str(startup) == "started in 4.0 s (data 2.0, compile 2.0)"


def test_a_long_start_leaves_one_line_and_quiet_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LONG", 0.0)
    train(digits(), str(tmp_path / "quiet"), quiet=True)
    assert capsys.readouterr().err == ""
    train(digits(), str(tmp_path / "shown"), imports=3.25)
    err = capsys.readouterr().err
    assert err.count("started in") == 1 and "import 3.2" in err


def test_without_a_terminal_a_long_run_says_now_and_then_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter([0.0, 10.0, 20.0, 40.0, 50.0])  # made; then four steps
    lines = progress.Lines("mine", Console(stderr=True, width=200), clock=lambda: next(seconds))
    training = SimpleNamespace(steps=5, total=20, newest={"test_error": [0.25], "images_per_second": 1200.0})
    for index in range(4):
        lines(training, 0, index)
    # 30 s for two steps after the first, and 97 of 100 to go
    assert capsys.readouterr().err == "mine: epoch 1/20  error 25.0 %  1,200 img/s  step 3/5  about 0:24:15 left\n"


# --- on a GPU ------------------------------------------------------------------------------------------------------


def synthetic(*settings: str) -> Recipe:
    recipe = Recipe(name="s", data=DataRecipe(name="synthetic"), network=NetworkRecipe(name="width-resnet42"))
    quick = ("train.epochs=3", "train.batch=64", "train.lr=0.01", "train.device=cuda", "train.compile=false")
    return override(recipe, [*quick, *settings])


@pytest.mark.cuda
@pytest.mark.parametrize("strategy", ["sgd", "osgd", "pcgrad"])
def test_graph_runs_side_by_side_are_what_they_are_alone(tmp_path: Path, strategy: str) -> None:
    recipes = [synthetic(f"strategy.name={strategy}", f"train.seed={seed}") for seed in range(3)]
    paths = [str(tmp_path / f"beside{seed}") for seed in range(3)]
    torch.backends.cudnn.deterministic = True
    try:
        train_side_by_side(list(zip(recipes, paths, strict=True)))
        for recipe, path in zip(recipes, paths, strict=True):
            train(recipe, path + "-alone", quiet=True)
    finally:
        torch.backends.cudnn.deterministic = False
    for path in paths:
        log = RunDir(path).read_log()
        assert [line["epoch"] for line in log] == [1, 2, 3] and all(line["seconds"] > 0 for line in log)
        for line, alone in zip(log, RunDir(path + "-alone").read_log(), strict=True):
            assert line["train_loss"] == pytest.approx(alone["train_loss"], rel=2e-2)  # convolutions use TF32


@pytest.mark.cuda
@pytest.mark.parametrize("strategy", ["sgd", "osgd"])
def test_runs_by_our_kernels_get_the_same_bits_alone_and_side_by_side(
    tmp_path: Path, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("train.precision=bfloat16", "train.compile=true", f"strategy.name={strategy}")
    recipes = [synthetic(*settings, f"train.seed={seed}") for seed in range(2)]
    torch.backends.cudnn.deterministic = True
    try:
        train_side_by_side([(recipe, str(tmp_path / f"beside{i}")) for i, recipe in enumerate(recipes)])
        train(recipes[1], str(tmp_path / "alone"), quiet=True)
    finally:
        torch.backends.cudnn.deterministic = False
    assert "could not be" not in capsys.readouterr().err, "by our kernels, in a graph"
    beside, alone, other = (weights(tmp_path / name) for name in ("beside1", "alone", "beside0"))
    assert all(torch.equal(beside[key], alone[key]) for key in alone)
    assert not all(torch.equal(other[key], alone[key]) for key in alone), "another seed"


@pytest.mark.cuda
@pytest.mark.parametrize("strategy", ["sgd", "osgd"])
@pytest.mark.parametrize("cutmix", [0.0, 0.5])
def test_a_captured_step_gives_the_same_bits_with_and_without_a_stream_aside(strategy: str, cutmix: float) -> None:
    half = torch.full((3,), 0.5, device="cuda")
    images = torch.randint(0, 256, (640, 3, 32, 32), dtype=torch.uint8, device="cuda")
    split = MemorySplit(images, torch.randint(0, 10, (640,), device="cuda"), half, half, 4, True, cutmix, 10)
    recipe = synthetic("train.precision=bfloat16", f"strategy.name={strategy}")
    found = []
    torch.backends.cudnn.deterministic = True
    try:
        for aside in (True, False):
            net = build(recipe.network, generator=torch.Generator().manual_seed(1))
            net = net.to("cuda", memory_format=torch.channels_last).train()  # type: ignore[call-overload]
            step = Step(net, make_optimizer(net, recipe, torch.device("cuda")), recipe, compiled=True)
            passes = step.tasks.nets if step.tasks is not None else [step.forward]
            for each in passes:
                assert isinstance(each, Fused) and each.side.stream is not None
                each.side.stream = each.side.stream if aside else None
            graph = stepping.start("graph", step, split, 64)  # which has no other way to go on
            for _ in graph.epoch(torch.Generator().manual_seed(2), [0.01] * graph.steps):
                pass
            torch.cuda.synchronize()
            found.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    finally:
        torch.backends.cudnn.deterministic = False
    assert torch.equal(*found)


@pytest.mark.cuda
def test_pupils_beside_their_teacher_learn_what_they_learn_after_it() -> None:
    """With distillation, tasks on streams of their own find the losses and rows that they find one after another."""
    recipe = synthetic("train.distill=0.7")
    net = build(recipe.network, generator=torch.Generator().manual_seed(0)).double().to("cuda").train()
    tasks = Tasks(net, OSGD(), recipe.train, compiled=False)
    streams = tasks.streams
    assert len(streams) == 3
    generator = torch.Generator("cuda").manual_seed(5)
    for _ in range(5):
        x = torch.randn(64, 3, 32, 32, generator=generator, device="cuda", dtype=torch.float64)
        y = torch.randint(0, 10, (64,), generator=generator, device="cuda")
        found = []
        for used in (streams, []):
            tasks.streams = used
            losses, _ = tasks(x, y)
            found.append((losses.clone(), tasks.rows.dense.clone()))
        for beside, after in zip(*found, strict=True):
            assert torch.allclose(beside, after, rtol=1e-5, atol=1e-7)  # losses are taken in float32


@pytest.mark.cuda
@pytest.mark.parametrize(
    "setting",
    [
        "strategy.name=osgd",
        "strategy.name=pcgrad",
        "strategy.name=greedy",
        "train.distill=0.5",
        "train.decay_norms=false",
    ],
)
def test_graph_and_eager_runs_agree(tmp_path: Path, setting: str) -> None:
    """With pcgrad also in chance: a graph finds its step's order on the device, the one that is drawn eagerly."""
    for way in ("eager", "graph"):
        train(synthetic(f"train.engine={way}", setting), str(tmp_path / way), quiet=True)
    for eager, graph in zip(*(RunDir(tmp_path / way).read_log() for way in ("eager", "graph")), strict=True):
        assert eager["train_loss"] == pytest.approx(graph["train_loss"], rel=2e-2)


@pytest.mark.cuda
def test_ten_thousand_images_are_evaluated_in_half_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    half = torch.full((3,), 0.5, device="cuda")
    images = torch.randint(0, 256, (10_000, 3, 32, 32), dtype=torch.uint8, device="cuda")
    split = MemorySplit(images, torch.randint(0, 10, (10_000,), device="cuda"), half, half)
    for name in ("width-resnet42", "depth-sparse98"):
        net = build(NetworkRecipe(name=name)).to("cuda", memory_format=torch.channels_last)  # type: ignore[call-overload]
        seconds = []
        for _ in range(4):
            began = Moment(torch.device("cuda"))
            torch.cuda.set_sync_debug_mode("error")
            try:
                evaluate.errors(*evaluate.answers(net, split))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            ended = Moment(torch.device("cuda"))
            ended.wait()
            seconds.append(ended.since(began))
        with capsys.disabled():
            print(f"\n{name}: first {seconds[0]:.3f} s, then {min(seconds[1:]):.3f} s for 10,000 images at all stages")
        assert min(seconds[1:]) < 0.5


def test_evaluating_in_other_batches_gives_the_same_answers() -> None:
    data = load(DataRecipe(name="digits"))
    net = build(NetworkRecipe(name="width-digits"))
    first, labels = evaluate.answers(net, data.test)
    second, same = evaluate.answers(net, data.test, batch=77)
    assert torch.equal(labels, same) and torch.allclose(first, second, atol=1e-5)
    assert evaluate.quick_batch(net.plan, torch.device("cpu")) == 1000
    cifar = build(NetworkRecipe(name="width-resnet42")).plan
    assert evaluate.quick_batch(cifar, torch.device("cuda")) == 2000
