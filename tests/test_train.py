"""Training for real, on small data: it learns, every way of getting the rows gives the same step, a resumed or killed run
ends where an uninterrupted one does, and what goes wrong is said."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_ranks import frozen_run

from nestling.commands import cli
from nestling.errors import NestlingError
from nestling.files import DiskFull
from nestling.nets import NestedNet, build
from nestling.recipes import RECIPES, named
from nestling.recipes.recipe import NetworkRecipe, Recipe, StrategyRecipe, TrainRecipe, override
from nestling.runs.folder import RunDir
from nestling.train import Training, train, train_side_by_side
from nestling.train import begin as begin_module
from nestling.train.schedule import learning_rate
from nestling.train.step import Step


def digits(*settings: str, name: str = "digits-width") -> Recipe:
    quick = ("train.epochs=2", "train.batch=128", "data.limit=512", "train.diagnostics=false")
    return override(named(name), [*quick, *settings])


def weights(run: Path) -> dict[str, torch.Tensor]:
    return RunDir(run).load_tensors("weights.safetensors")[0]


def stepped(recipe: Recipe, own_subnets: bool, steps: int = 3) -> tuple[NestedNet, list[torch.Tensor]]:
    """A float64 net after a few steps, its rows obtained one way or the other."""
    net = build(recipe.network).double().train()
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    monkey = pytest.MonkeyPatch()
    monkey.setattr("nestling.train.step.worth_own_subnets", lambda _: own_subnets)
    step = Step(net, optimizer, recipe)
    monkey.undo()
    assert (step.tasks is not None) == own_subnets
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 1, 8, 8, generator=generator, dtype=torch.float64)
        losses.append(step(x, torch.randint(0, 10, (16,), generator=generator)))
    return net, losses


@pytest.mark.parametrize("network", ["width-digits", "depth-digits", "alternate-digits", "cascade-digits"])
@pytest.mark.parametrize(
    "strategy",
    ["osgd", "osgd-norm", "normsgd", "osgd shared", "osgd block", "osgd tensor", "osgd distill", "osgd reversed"],
)
def test_tasks_through_their_own_subnetworks_take_the_same_step(network: str, strategy: str) -> None:
    name, _, extra = strategy.partition(" ")
    scope: Any = extra if extra in ("shared", "block", "tensor") else "all"
    stages = len(build(NetworkRecipe(name=network)).plan.heads)
    order = tuple(range(stages, 0, -1)) if extra == "reversed" else ()
    recipe = Recipe(
        name="step",
        network=NetworkRecipe(name=network),
        strategy=StrategyRecipe(name=name, scope=scope, order=order),
        train=TrainRecipe(distill=0.5 if extra == "distill" else 0.0),
    )
    shared, first = stepped(recipe, own_subnets=False)
    own, second = stepped(recipe, own_subnets=True)
    assert torch.allclose(torch.stack(first), torch.stack(second), rtol=1e-9)
    for (key, a), b in zip(shared.state_dict().items(), own.state_dict().values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-11), key


@pytest.mark.parametrize("strategy", ["sgd", "sgd-sum", "normsgd", "osgd", "osgd-norm", "pcgrad", "damped"])
def test_every_strategy_learns(tmp_path: Path, strategy: str) -> None:
    # osgd-norm and normsgd move a fixed distance per step, so they get a rate of their own
    rate = "train.lr=0.5" if "norm" in strategy else "train.lr=0.1"
    recipe = digits(f"strategy.name={strategy}", rate, "train.epochs=4", "data.limit=0", "train.batch=32")
    results = train(recipe, str(tmp_path / "run"), quiet=True)
    assert results["stages"][-1]["error"] < 0.4
    log = RunDir(tmp_path / "run").read_log()
    assert [line["epoch"] for line in log] == [1, 2, 3, 4]
    assert log[-1]["train_loss"][-1] < log[0]["train_loss"][-1]


def test_resume_equals_an_uninterrupted_run_bit_for_bit(tmp_path: Path) -> None:
    recipe = digits("train.epochs=4", "train.average=0.9")
    train(recipe, str(tmp_path / "whole"), quiet=True)
    stopped = Training(recipe, RunDir.create(tmp_path / "parts"))
    stopped.run.write_recipe(recipe)
    for epoch, index in stopped.epochs():
        if (epoch, index) == (2, 1):  # in the middle of the third epoch
            break
    train(recipe, str(tmp_path / "parts"), resume=True, quiet=True)
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert untimed(tmp_path / "whole") == untimed(tmp_path / "parts")


@pytest.mark.parametrize(
    "strategy", ["pcgrad", "pcgrad strategy.scope=tensor", "pcgrad strategy.refresh=3", "osgd strategy.refresh=3"]
)
@pytest.mark.parametrize("name", ["digits-width", "digits-depth"])
def test_what_a_combiner_draws_or_keeps_follows_the_recipe_also_after_resuming(
    tmp_path: Path, name: str, strategy: str
) -> None:
    """PCGrad's orders and kept weights (an epoch has 4 steps): never stopped as stopped twice, whatever torch's own
    generator did."""
    recipe = digits("train.epochs=3", *f"strategy.name={strategy}".split(), name=name)
    torch.manual_seed(1)
    train(recipe, str(tmp_path / "whole"), quiet=True)
    for part in range(3):
        torch.manual_seed(100 + part)
        seconds = 0.0 if part < 2 else float("inf")
        train(recipe, str(tmp_path / "parts"), resume=part > 0, quiet=True, seconds=seconds)
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert untimed(tmp_path / "whole") == untimed(tmp_path / "parts")


def untimed(run: Path) -> list[dict[str, Any]]:
    skip = ("seconds", "images_per_second")
    return [{key: value for key, value in line.items() if key not in skip} for line in RunDir(run).read_log()]


def test_killed_runs_end_like_one_never_killed(tmp_path: Path) -> None:
    """Really killed, with SIGKILL, at several moments; then resumed from the command line."""
    settings = ["train.epochs=5", "train.batch=128", "data.limit=512", "train.diagnostics=false"]
    flags = [word for setting in settings for word in ("--set", setting)]
    base = [sys.executable, "-m", "nestling", "train", "digits-width", *flags, "--quiet"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*base, "--out", str(whole)], check=True, capture_output=True)
    lines = 0
    for _ in range(2):
        going_on = ["--resume", str(killed)] if (killed / "recipe.json").exists() else ["--out", str(killed)]
        process = subprocess.Popen([*base, *going_on], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_log(killed / "log.jsonl", lines + 1, process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        lines = len(RunDir(killed).read_log())
    subprocess.run([*base, "--resume", str(killed)], check=True, capture_output=True)
    first, second = weights(whole), weights(killed)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert untimed(whole) == untimed(killed)


def wait_for_log(path: Path, lines: int, process: "subprocess.Popen[bytes]", seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        if path.exists() and path.read_text().count("\n") >= lines:
            return
        time.sleep(0.005)
    assert process.poll() is None or path.read_text().count("\n") >= lines, "the run ended before it could be killed"


def test_resuming_with_another_recipe_is_refused(tmp_path: Path) -> None:
    train(digits(), str(tmp_path / "run"), quiet=True)
    with pytest.raises(NestlingError, match=r"train\.lr was 0\.1, now 0\.2"):
        train(digits("train.lr=0.2"), str(tmp_path / "run"), resume=True, quiet=True)


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = train(digits(), str(tmp_path / "run"), quiet=True)
    before = (tmp_path / "run" / "weights.safetensors").stat().st_mtime_ns
    assert train(digits(), str(tmp_path / "run"), resume=True, quiet=True) == first
    assert (tmp_path / "run" / "weights.safetensors").stat().st_mtime_ns == before
    with pytest.raises(NestlingError, match="already holds a run"):
        train(digits(), str(tmp_path / "run"), quiet=True)


def test_a_run_from_before_a_field_was_there_goes_on(tmp_path: Path) -> None:
    """Its recipe.json and its checkpoint do not have it."""
    train(digits(), str(tmp_path / "whole"), quiet=True)
    stop_after_one_epoch(digits(), tmp_path / "older")
    run = RunDir(tmp_path / "older")
    recipe = run.read_json("recipe.json")
    assert recipe["train"].pop("decay_norms") is True and recipe["train"].pop("sync_norms") is False
    assert recipe["strategy"].pop("constant") == 0.5 and recipe["strategy"].pop("literal") is False
    run.write_json("recipe.json", recipe)
    tensors, meta = run.load_checkpoint()
    run.save_checkpoint(tensors, {**meta, "recipe": recipe})
    train(digits(), str(tmp_path / "older"), resume=True, quiet=True)
    for key, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "older")[key]), key


def test_what_a_device_cannot_do_stands_with_the_part_of_the_run_that_did_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Old(Training):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.given_up = ["no bfloat16 here"]

    train(digits(), str(tmp_path / "begun"), quiet=True, seconds=0.0)
    monkeypatch.setattr(begin_module, "Training", Old)
    train(digits(), str(tmp_path / "begun"), resume=True, quiet=True)
    found = RunDir(tmp_path / "begun").read_json("provenance.json")
    assert "given_up" not in found and found["resumed"][-1]["given_up"] == ["no bfloat16 here"]


def test_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    stop_after_one_epoch(digits(), tmp_path / "mine")
    stop_after_one_epoch(digits("network.name=depth-digits"), tmp_path / "other")
    foreign = (tmp_path / "other" / "checkpoint.safetensors").read_bytes()
    (tmp_path / "mine" / "checkpoint.safetensors").write_bytes(foreign)
    with pytest.raises(NestlingError, match="belongs to another recipe"):
        train(digits(), str(tmp_path / "mine"), resume=True, quiet=True)


def stop_after_one_epoch(recipe: Recipe, path: Path) -> None:
    training = Training(recipe, RunDir.create(path))
    training.run.write_recipe(recipe)
    for epoch, _ in training.epochs():
        if epoch == 1:
            return


def test_nan_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    recipe = digits("train.epochs=4", "train.batch=128")
    training = Training(recipe, RunDir.create(tmp_path / "run"))
    training.run.write_recipe(recipe)
    with pytest.raises(
        NestlingError, match=r"the loss of stage 2 became nan at step 6 .*checkpoint of epoch 1 is kept"
    ):
        for epoch, index in training.epochs():
            if (epoch, index) == (1, 0):  # after step 5: poison the weights of head 2
                with torch.no_grad():
                    training.net.layer("head2.linear").weight.fill_(float("nan"))
    tensors, meta = RunDir(tmp_path / "run").load_checkpoint()
    assert meta["epoch"] == 1
    assert all(torch.isfinite(value).all() for value in tensors.values())


@pytest.mark.parametrize(
    "settings, message",
    [
        (["strategy.order=1,2"], "expected each of 1 to 3 once"),
        (["strategy.importance=1,2"], "this network has 3 stages"),
        (["network.alone=2", "strategy.importance=1,1,2"], "this network has one stage"),
        (["train.batch=600"], "more than the 512 training images"),
        (["network.name=width-digit"], "did you mean width-digits"),
        (["train.engine=graph", "train.device=cpu"], "train.engine=graph cannot be used"),
        (["network.growth=w,,w"], "stage 3 is empty"),
    ],
)
def test_bad_recipes_are_explained(tmp_path: Path, settings: list[str], message: str) -> None:
    with pytest.raises(NestlingError, match=message):
        train(digits(*settings), str(tmp_path / "run"), quiet=True)


def test_unknown_recipe_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(NestlingError, match="did you mean digits-width"):
        named("digit-width")
    with pytest.raises(NestlingError, match=r"run's folder, not a recipe; its recipe is .*recipe\.json"):
        (tmp_path / "recipe.json").write_text("{}")
        named(str(tmp_path))
    assert all(make().name == name for name, make in RECIPES.items())


def test_learning_rates_by_hand() -> None:
    steps = TrainRecipe(epochs=200, lr=0.1, milestones=(60, 120, 160), gamma=0.2)
    assert [learning_rate(steps, epoch * 10, 10) for epoch in (0, 59, 60, 120, 199)] == pytest.approx(
        [0.1, 0.1, 0.02, 0.004, 0.0008]
    )
    cosine = TrainRecipe(epochs=10, lr=0.2, schedule="cosine", warmup=2)
    assert [learning_rate(cosine, step, 5) for step in (0, 9, 10, 30)] == pytest.approx([0.02, 0.2, 0.2, 0.1])


PAPERS = {  # epochs, batch, weight decay (ours on CIFAR-10: the paper gives none), first epoch -> rate from there on
    "cifar10": (200, 128, 5e-4, {0: 0.1, 60: 0.02, 120: 0.004, 160: 0.0008}),
    "imagenet": (90, 256, 1e-4, {0: 0.1, 30: 0.01, 60: 0.001, 80: 0.0001}),
}


@pytest.mark.parametrize(
    "name", [name for name in RECIPES if name.partition("-")[0] in PAPERS and name != "cifar10-msdnet"]
)  # MSDNet has its authors' own
def test_the_papers_recipes_have_its_schedule(name: str) -> None:
    epochs, batch, decay, rates = PAPERS[name.partition("-")[0]]
    made = RECIPES[name]().train
    assert (made.epochs, made.batch, made.weight_decay) == (epochs, batch, decay)
    assert (made.momentum, made.nesterov, made.warmup, made.schedule) == (0.9, True, 0, "step")
    expected, rate = [], 0.0
    for epoch in range(epochs):
        rate = rates.get(epoch, rate)
        expected.append(rate)
    assert [learning_rate(made, 7 * epoch, 7) for epoch in range(epochs)] == pytest.approx(expected)
    assert [learning_rate(made, 7 * epoch + 6, 7) for epoch in range(epochs)] == pytest.approx(expected)


def test_the_log_and_the_folder_say_what_was_done(tmp_path: Path) -> None:
    train(digits("train.diagnostics=true"), str(tmp_path / "run"), quiet=True, command="nestling train digits-width")
    run = RunDir(tmp_path / "run")
    line = run.read_log()[-1]
    assert len(line["cosines"]) == 3 and line["cosines"][0][0] == pytest.approx(1)
    assert line["weights"][0][-1] == 1.0, "the last task's weight is one"
    assert json.loads((tmp_path / "run" / "provenance.json").read_text())["command"] == "nestling train digits-width"
    assert run.read_recipe() == digits("train.diagnostics=true")
    assert dataclasses.asdict(run.read_recipe())["network"]["name"] == "width-digits"


def test_side_by_side_runs_are_what_they_would_be_alone(tmp_path: Path) -> None:
    """Two runs taking turns, stopped once for lack of time and gone on with, end bitwise like each of them alone."""
    recipes = [digits("train.epochs=3"), digits("train.epochs=3", "train.seed=1", "strategy.name=sgd")]
    paths = [str(tmp_path / name) for name in ("a", "b")]
    assert train_side_by_side(list(zip(recipes, paths, strict=True)), seconds=0) == []
    assert [len(RunDir(path).read_log()) for path in paths] == [1, 1]
    train_side_by_side(list(zip(recipes, paths, strict=True)))
    for recipe, path in zip(recipes, paths, strict=True):
        train(recipe, path + "-alone", quiet=True)
        first, second = weights(Path(path)), weights(Path(path + "-alone"))
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_flat_rows_see_what_float32_would_miss() -> None:
    """Two nearly parallel gradients: their inner products must be good to much better than the angle between them."""
    from nestling.gradients.flat import FlatRows
    from nestling.gradients.owners import MemoryShape, from_masks

    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(1_000_000))
    first = torch.randn(1_000_000, generator=generator)
    second = first + 0.01 * torch.randn(1_000_000, generator=generator)
    layout = from_masks((MemoryShape.of(parameter),), (3,), 2)
    rows = FlatRows([parameter], layout, [torch.arange(1_000_000)] * 2)
    rows.put(0, [first])
    rows.put(1, [second])
    exact = torch.stack([first, second]).double() @ torch.stack([first, second]).double().T
    assert torch.allclose(rows.gram()[0], exact, rtol=1e-7)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_rows_are_multiplied_as_they_are_where_the_network_trains_in_bfloat16(device: str) -> None:
    from nestling.gradients.combiners import OSGD
    from nestling.train.tasks import Tasks

    net = build(NetworkRecipe(name="width-resnet42", blocks=(1, 1, 1), widths=(8, 16, 16))).train().to(device)
    tasks = Tasks(net, OSGD(), TrainRecipe(precision="bfloat16"), compiled=False)
    x, y = torch.randn(8, 3, 32, 32, device=device), torch.arange(8, device=device)
    with torch.autocast(device, torch.bfloat16):
        _, report = tasks(x, y)
    rows = tasks.rows.dense.double()
    assert report.gram is not None and report.weights is not None
    torch.testing.assert_close(report.gram[0], rows @ rows.T, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(tasks.rows.update.double(), report.weights[0].double() @ rows, rtol=1e-5, atol=1e-9)


def test_two_ranks_train_like_one_process(tmp_path: Path) -> None:
    """torchrun with two processes: the ranks end bitwise equal, and equal to one process on the joined batch.

    Batch statistics differ between half batches and whole ones, so the comparison with one process is of a network whose
    statistics are frozen; the equality of the ranks is of the network as it is.
    """
    script = Path(__file__).parent / "train_ranks.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, str(script), str(tmp_path)], check=True, capture_output=True, timeout=240)
    first, second = (load_file(tmp_path / f"rank{rank}.safetensors") for rank in (0, 1))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert [line["epoch"] for line in RunDir(tmp_path / "run").read_log()] == [1, 2]
    joined = frozen_run(tmp_path / "one")
    together = weights(tmp_path / "frozen")
    assert all(torch.allclose(joined[key], together[key], atol=1e-6) for key in joined)


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(digits("train.tensorboard=true"), str(tmp_path / "run"), quiet=True)
    events = reader.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    shown = [event.value for event in events.Scalars("test_error/stage3")]
    assert shown == pytest.approx([line["test_error"][2] for line in RunDir(tmp_path / "run").read_log()])


def test_torchrun_on_the_command_line(tmp_path: Path) -> None:
    """`torchrun -m nestling train`: one folder, one log, one table, from the first rank alone."""
    settings = ["train.epochs=1", "train.batch=128", "data.limit=256"]
    flags = [word for setting in settings for word in ("--set", setting)]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "nestling",
    ]
    command = [*torchrun, "train", "digits-depth", *flags, "--out", str(tmp_path / "run"), "--quiet", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, timeout=240, text=True)
    assert json.loads(done.stdout)["network"] == "depth-digits"
    assert len(RunDir(tmp_path / "run").read_log()) == 1


def test_greedy_trains_stage_after_stage_and_leaves_earlier_ones_alone(tmp_path: Path) -> None:
    """Every stage gets the recipe's epochs; once a stage is done, its answers never change again, bit for bit."""
    recipe = digits("strategy.name=greedy", "train.epochs=2", "train.lr=0.05", "data.limit=0", "train.batch=32")
    train(recipe, str(tmp_path / "run"), quiet=True)
    log = RunDir(tmp_path / "run").read_log()
    assert [line["epoch"] for line in log] == [1, 2, 3, 4, 5, 6]
    assert [line["lr"] for line in log[:2]] == [line["lr"] for line in log[2:4]], "the rate starts anew with each stage"
    for stage, line in ((0, 1), (1, 3)):
        assert {later["test_loss"][stage] for later in log[line:]} == {log[line]["test_loss"][stage]}
    for stage in range(3):
        assert log[2 * stage + 1]["train_loss"][stage] < log[2 * stage]["train_loss"][stage], (
            "each stage learns in its turn"
        )


def test_greedy_resumes_in_the_middle_of_a_stage(tmp_path: Path) -> None:
    recipe = digits("strategy.name=greedy", "train.epochs=2")
    train(recipe, str(tmp_path / "whole"), quiet=True)
    for _ in range(3):  # stops after every epoch
        train(recipe, str(tmp_path / "parts"), resume=(tmp_path / "parts").exists(), quiet=True, seconds=0)
    train(recipe, str(tmp_path / "parts"), resume=True, quiet=True)
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_stopped_run_says_the_command_that_goes_on_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = ["digits-width", "--set", "train.epochs=2", "--set", "train.batch=512", "--out", str(folder), "--quiet"]
    assert cli.main(["train", *words, "--minutes", "0.00001"]) == 0 and not (folder / "results.json").exists()
    command = RunDir(folder).going_on()
    assert "".join(command.split()) in "".join(capsys.readouterr().out.split())  # however the lines were broken
    assert cli.main([*command.split()[1:], "--quiet"]) == 0
    assert len(RunDir.open(folder).read_log()) == 2


def test_a_run_goes_on_without_its_recipe_being_named_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "run")
    train(digits("train.epochs=2"), folder, quiet=True, seconds=0)
    assert cli.main(["train", "digits-depth", "--resume", folder, "--quiet"]) == 1
    said = capsys.readouterr().err
    assert "trained with another recipe (name was 'digits-width', now 'digits-depth')" in said
    assert RunDir(folder).going_on() in said
    assert cli.main(["train", "--resume", folder, "--set", "train.lr=0.3", "--quiet"]) == 1
    assert "now 0.3" in capsys.readouterr().err
    assert cli.main(["train", "--resume", folder, "--quiet"]) == 0
    origin = RunDir(folder).read_json("provenance.json")
    assert len(RunDir(folder).read_log()) == 2
    assert origin["resumed"][0]["command"] == "nestling train --resume run", "a name, not a folder of this machine"
    assert cli.main(["train", "--out", str(tmp_path / "other")]) == 1
    assert "no recipe was named; give one of digits-width" in capsys.readouterr().err


def full_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From now on the disk is full whenever a file of this name is to be put in its place."""
    replace = os.replace

    def no_room(old: Path, new: Path) -> None:
        if Path(new).name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(old, new)

    monkeypatch.setattr(os, "replace", no_room)


def test_a_full_disk_is_told_by_what_was_being_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as full:
        full_disk(full, "weights.safetensors")
        with pytest.raises(DiskFull) as caught:
            train(digits(), str(run), quiet=True)
    assert f"{RunDir(run).going_on()} goes on from its last checkpoint" in str(caught.value)
    assert cli.main([*RunDir(run).going_on().split()[1:], "--quiet"]) == 0
    for name, words in {
        "report.html": ["report", str(run), "--out", str(tmp_path / "report.html")],
        "manifest.json": ["export", str(run)],
        "profile.json": ["profile", str(run), "--repeats", "2", "--engine", "eager"],
    }.items():
        with monkeypatch.context() as full:
            full_disk(full, name)
            capsys.readouterr()
            assert cli.main(words) == 1
        said = capsys.readouterr().err
        assert "the disk is full" in said and "free some space and try again" in said and "resume" not in said, said


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "notes.txt").write_text("mine")
    for folder in (tmp_path / "new", there):
        assert cli.main(["train", "imagenet-width", "--set", "data.root=nowhere", "--out", str(folder)]) == 1
    assert not (tmp_path / "new").exists() and [each.name for each in there.iterdir()] == ["notes.txt"]


def test_one_folder_is_trained_by_one_process_at_a_time(tmp_path: Path) -> None:
    recipe, path = digits("train.epochs=1"), str(tmp_path / "run")
    training = begin_module.prepare(recipe, path, False, "first")
    assert training is not None
    for resume in (False, True):
        with pytest.raises(NestlingError, match=r"is being trained by .*; wait for it, stop it, or train into"):
            train(recipe, path, resume=resume, quiet=True)
    assert RunDir(path).read_recipe() == recipe, "what the first one wrote is untouched"
    training.run.release()
    results = train(recipe, path, resume=True, quiet=True)
    assert results["stages"] and not (tmp_path / "run" / ".lock").exists()
    with pytest.raises(NestlingError, match="already holds a run"):
        train(recipe, path, quiet=True)
    assert train(recipe, path, resume=True, quiet=True) == results, "and whoever was refused holds nothing"


@pytest.mark.parametrize("strategy", ["sgd", "osgd", "greedy"])
def test_mixed_images_are_learnt_as_shares_of_classes(tmp_path: Path, strategy: str) -> None:
    """The loss of the first epoch is a cross-entropy: about the logarithm of ten, and not a squared error."""
    recipe = override(
        RECIPES["digits-width"](),
        ["data.cutmix=1", "train.epochs=1", "data.limit=64", "train.lr=1e-6", f"strategy.name={strategy}"],
    )
    train(recipe, str(tmp_path / "run"))
    (line, *_) = RunDir(tmp_path / "run").read_log()
    assert all(1.5 < loss < 4 for loss in line["train_loss"] if loss), line["train_loss"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["digits-width", "--minutes", "-1"], "--minutes is -1"),
        (["digits-width", "--minutes", "nan"], "--minutes is nan"),
        (["--resume", "here", "--out", "there"], "--out there means nothing"),
        (["digits-width", "--set", "data.size=64"], "data.size would have no effect"),
    ],
)
def test_words_that_mean_nothing_are_refused(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *words, "--quiet"]) == 1
    assert why in capsys.readouterr().err
