"""Networks of the user's own: `nestling.fit` leaves a run folder that everything else opens, and no code."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import nestling
from nestling import NestlingError
from nestling.commands import evaluate, export, predict, profile, report
from nestling.data import load
from nestling.files import CHECKPOINT, NETWORK, RECIPE
from nestling.recipes.code import HANDED
from nestling.recipes.recipe import DataRecipe
from nestling.recipes.strategies import STRATEGIES
from nestling.runtime.portable import Portable

Pair = tuple[Tensor, Tensor]


def digits(count: int = 256) -> tuple[Pair, Pair]:
    """Real images as they lie in files, and their labels: (training, test)."""
    found: Any = load(DataRecipe(name="digits"))
    return (found.train.images[:count], found.train.labels[:count]), (found.test.images, found.test.labels)


def floats(pair: Pair) -> Pair:
    return pair[0].float() / 255 - 0.3, pair[1]


def backbone(drop: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(drop),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def nested() -> nestling.NestedNet:
    return nestling.nest(backbone(), "w,w", shape=(1, 8, 8))


def state(net: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in net.state_dict().items()}


def errors_of(run: Any) -> list[float]:
    return [row["error"] for row in run.results["stages"]]


def test_everything_else_opens_what_fit_leaves(tmp_path: Path) -> None:
    (train, test), net, teacher = digits(1437), nested(), backbone()
    run = nestling.fit(net, train, test, teacher=teacher, out=tmp_path / "mine", epochs=4, quiet=True)
    assert errors_of(run)[-1] < 0.7 and run.results["n"] == 360
    assert 0 <= run.results["teacher"]["error"] <= 1
    assert all(torch.equal(net.state_dict()[key], value) for key, value in run.net().state_dict().items())
    again = evaluate.command(str(run.path), device="cpu")
    assert [row["error"] for row in again["stages"]] == errors_of(run) and again["stored"]
    assert nestling.resolve(run.path).results["teacher"] == run.results["teacher"]  # evaluating anew does not lose it
    assert len(profile.command(str(run.path), device="cpu", repeats=3)["stages"]) == 3
    picture = tmp_path / "digit.png"
    Image.fromarray(test[0][0, 0].numpy()).save(picture)
    said = predict.command(str(run.path), (str(picture),), device="cpu")["images"][0]["answer"]
    with nestling.Runtime(run, device="cpu") as runtime:
        assert runtime.answer(test[0][0]).label == said["label"]
        assert runtime.stop_when_sure(0.01).images == 180
    folder = export.command(str(run.path))["folder"]
    with Portable(folder) as portable:
        assert portable.answer(test[0][0].numpy()).label == said["label"]


def test_a_folder_holds_data_and_never_code(tmp_path: Path) -> None:
    train, test = digits(64)
    nestling.fit(nested(), train, test, out=tmp_path / "mine", epochs=1, quiet=True)
    assert {path.suffix for path in (tmp_path / "mine").iterdir() if path.is_file()} <= {
        ".json",
        ".jsonl",
        ".safetensors",
    }
    network = json.loads((tmp_path / "mine" / RECIPE).read_text())["network"]
    HANDED.pop(network["name"])
    (tmp_path / "mine" / NETWORK).unlink()  # as of folders from before, and of networks that cannot be told as data
    with pytest.raises(NestlingError, match="a folder holds no code"):
        nestling.load(tmp_path / "mine")
    assert nestling.load(tmp_path / "mine", build=nested).plan.stages == 3


def test_the_reports_first_table_is_your_network_and_each_stage_beside_it(tmp_path: Path) -> None:
    (train, test), module = digits(128), backbone()
    net = nestling.exits(module, at=(0.3,), shape=(1, 8, 8))
    run = nestling.fit(net, train, test, teacher=module, out=tmp_path / "mine", epochs=1, quiet=True, repeats=5)
    made = report.command((str(run.path),), str(tmp_path / "report.html"))
    first = (tmp_path / "report.md").read_text().partition("|")[2].split("\n\n")[0]
    rows = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in f"|{first}".splitlines()]
    assert [row[0].split("  ")[0] for row in rows[2:]] == ["your network", "stage 1, exit1", "stage 2, full"], made
    errors = [float(row[1]) for row in rows[2:]]
    assert errors[0] == pytest.approx(errors[2]) == pytest.approx(100 * run.results["teacher"]["error"], abs=0.01)
    assert all(row[3].split()[0] != "–" for row in rows[2:]) and all(row[4] != "–" for row in rows[2:])


def test_a_teacher_that_cannot_be_read_is_timed_by_torch(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = backbone()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.inner(x if float(x.mean()) > -1e9 else -x)
            return found

    train, test = digits(64)
    run = nestling.fit(nested(), train, test, teacher=Odd(), out=tmp_path / "mine", epochs=1, quiet=True, repeats=3)
    assert run.read_json("profile.json")["teacher"]["engine"] == "torch eager"
    report.command((str(run.path),), str(tmp_path / "report.html"))
    assert "timed by torch eager" in (tmp_path / "report.md").read_text()


class Pictures(Dataset[tuple[Tensor, int]]):
    classes = tuple("abcdefghij")

    def __init__(self, pair: Pair) -> None:
        self.pair = floats(pair)

    def __len__(self) -> int:
        return len(self.pair[0])

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.pair[0][index], int(self.pair[1][index])


def forms() -> dict[str, tuple[Any, Any]]:
    train, test = digits(128)
    return {
        "uint8 tensors": (train, test),
        "float tensors": (floats(train), floats(test)),
        "TensorDataset": (TensorDataset(*floats(train)), TensorDataset(*floats(test))),
        "Dataset": (Pictures(train), Pictures(test)),
        "DataLoader": (DataLoader(Pictures(train), 32, shuffle=True), DataLoader(Pictures(test), 100)),
    }


def test_weights_from_before_nesting_are_refused_with_what_to_do() -> None:
    module = backbone()
    for net in (nested(), nestling.exits(module, at=(0.3,), shape=(1, 8, 8)), nestling.keep(module, shape=(1, 8, 8))):
        with pytest.raises(NestlingError, match=r"saved before nesting go into the module.*module.load_state_dict"):
            net.load_state_dict(module.state_dict())
        net.load_state_dict(net.state_dict())
    x, trained = torch.randn(2, 1, 8, 8), backbone()
    torch.nn.init.normal_(next(trained.parameters()))
    module.load_state_dict(trained.state_dict())  # what the message says
    assert torch.allclose(nestling.nest(module.eval(), "", shape=(1, 8, 8))(x)[0], trained.eval()(x), atol=1e-6)


@pytest.mark.parametrize("form", list(forms()))
def test_data_come_in_any_form(form: str, tmp_path: Path) -> None:
    train, test = forms()[form]
    run = nestling.fit(nested(), train, test, out=tmp_path / "mine", epochs=1, batch=32, quiet=True, repeats=0)
    assert run.results["n"] == 360 and len(run.read_log()) == 1
    assert run.results["classes"] == list("abcdefghij" if "Data" in form and "Tensor" not in form else "0123456789")
    assert run.images(8).shape == (8, 1, 8, 8)
    assert evaluate.command(str(run.path), device="cpu")["stages"][0]["error"] == errors_of(run)[0]
    with nestling.Runtime(run, device="cpu") as runtime:
        assert runtime.answer(run.images(1)[0]).stage == 3


def test_a_data_set_by_name_and_a_folder_of_pictures(tmp_path: Path) -> None:
    run = nestling.fit(nested(), "digits", out=tmp_path / "named", epochs=1, quiet=True)
    assert run.results["data"] == "digits"
    images, labels = digits()[1]
    for part in ("train", "val"):
        for index in range(40):
            place = tmp_path / "pictures" / part / str(int(labels[index]))
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[index, 0].numpy()).convert("RGB").save(place / f"{index}.png")
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    net = nestling.nest(module, "w", shape=(3, 8, 8))
    run = nestling.fit(
        net, str(tmp_path / "pictures"), out=tmp_path / "folder", epochs=1, batch=8, quiet=True, repeats=0
    )
    assert run.results["classes"] == sorted("0123456789") and run.results["n"] == 40


def test_only_what_needs_gradients_is_trained_and_what_is_in_evaluation_stays(tmp_path: Path) -> None:
    train, test = digits(64)
    net = nested().train()
    frozen = net.get_submodule("1").eval()
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    before, kept = state(net), state(frozen)
    nestling.fit(net, train, test, out=tmp_path / "mine", epochs=2, batch=32, quiet=True, repeats=0)
    assert all(torch.equal(frozen.state_dict()[key], value) for key, value in kept.items())
    assert not frozen.training and net.training
    changed = {key for key, value in net.state_dict().items() if not torch.equal(before[key], value)}
    assert "0.weight" in changed and "4.running_mean" in changed


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_exits_train_by_every_strategy_and_the_backbone_stays(strategy: str, tmp_path: Path) -> None:
    (train, test), module = digits(128), backbone().eval()
    net = nestling.exits(module, at=(0.3,), shape=(1, 8, 8))
    x = floats(test)[0]
    before = net.eval()(x)
    run = nestling.fit(
        net,
        train,
        test,
        teacher=module,
        out=tmp_path / "mine",
        epochs=1,
        batch=32,
        strategy=strategy,
        quiet=True,
        repeats=0,
    )
    assert len(run.read_log()) == 1  # greedy training gives no turn to a stage of which nothing trains
    after = net.eval()(x)
    assert torch.equal(before[-1], after[-1]) and not torch.equal(before[0], after[0])


def losses_of(y: Tensor, x: Tensor) -> Tensor:
    return nn.functional.multi_margin_loss(y, x)


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    train, test = digits(64)
    run = nestling.fit(
        nested(), train, test, loss=losses_of, out=tmp_path / "mine", epochs=1, batch=32, quiet=True, repeats=0
    )
    assert run.recipe.train.loss.endswith(":losses_of")
    logits, labels = (run.outputs()[key] for key in ("logits", "labels"))
    assert run.read_log()[0]["test_loss"][0] == pytest.approx(float(losses_of(logits[0], labels)), abs=1e-5)


@pytest.mark.parametrize("seeded", [False, True], ids=["torch's", "a generator of one's own"])
def test_a_stopped_run_goes_on_bit_for_bit(seeded: bool, tmp_path: Path) -> None:
    """Dropout and a shuffling DataLoader draw from torch itself; a generator of the loader's is seeded with it."""
    train, test = (Pictures(part) for part in digits(96))

    def go(out: str, **more: Any) -> Any:
        net = nestling.nest(backbone(drop=0.3), "w", shape=(1, 8, 8))
        generator = torch.Generator().manual_seed(3) if seeded else None
        loaders = DataLoader(train, 32, shuffle=True, generator=generator), DataLoader(test, 64)
        return nestling.fit(net, *loaders, out=tmp_path / out, epochs=3, quiet=True, repeats=0, **more)

    whole = go("whole")
    stopped = go("parts", seconds=0.0)
    assert stopped.has(CHECKPOINT) and not stopped.results
    assert 'nestling.fit(..., out="' in stopped.going_on()
    resumed = go("parts", resume=True)
    assert errors_of(resumed) == errors_of(whole)
    mine, theirs = resumed.net().state_dict(), whole.net().state_dict()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda out: nestling.fit(backbone(), "digits", out=out), "make it anytime first"),
        (lambda out: nestling.fit(backbone, "digits", out=out), "say how it becomes anytime"),
        (lambda out: nestling.fit(nested, "digits", out=out, way="nest()"), "a nested network already"),
        (lambda out: nestling.fit(backbone, "digits", out=out, way="nets()"), "did you mean nest"),
        (lambda out: nestling.fit(backbone, "digits", out=out, way="nest(growth=open('x'))"), "expected a way"),
        (lambda out: nestling.fit(nested(), "digit", out=out), "and no test data"),
        (lambda out: nestling.fit(nested(), [1], [2], out=out), "the training data are a list"),
        (lambda out: nestling.fit("nowhere.py:build", "digits", out=out), "there is no file nowhere.py"),
    ],
)
def test_what_cannot_be_fitted_is_refused(wrong: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(NestlingError, match=match):
        wrong(tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def loader(pair: Pair, batch: int = 32, **how: Any) -> "DataLoader[Any]":
    return DataLoader(TensorDataset(*pair), batch, **how)


class Given(Pictures):
    """Pictures of which something is otherwise."""

    def __init__(self, pair: Pair, sample: Any = None, **more: Any) -> None:
        super().__init__(pair)
        self.sample = sample
        vars(self).update(more)

    def __getitem__(self, index: int) -> Any:
        found = super().__getitem__(index)
        return self.sample(index, *found) if self.sample else found


class Told(IterableDataset[tuple[Tensor, Tensor]]):
    """As many samples as there are, of which `count` are told; once or whenever asked."""

    def __init__(self, pair: Pair, count: int, once: bool = False) -> None:
        self.pair, self.count = floats(pair), count
        self.only = iter(zip(*self.pair, strict=True)) if once else None

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        return self.only or zip(*self.pair, strict=True)


def unlabelled(index: int, x: Tensor, y: int) -> tuple[Tensor, int]:
    return x, -100 if index == 5 else y


def sized(index: int, x: Tensor, y: int) -> tuple[Tensor, int]:
    return x[:, : 8 - index % 2], y


def drawn(index: int, x: Tensor, y: int) -> tuple[Any, int]:
    return Image.new("L", (8, 8)), y


def one_hot(pair: Pair) -> Pair:
    return pair[0], nn.functional.one_hot(pair[1], 10).float()


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda train, test: (train, floats(test)), "the training data are tensors with uint8 images.*in one form"),
        (lambda train, test: (train, loader(test)), "the training data are tensors with uint8 images.*in one form"),
        (lambda train, test: (loader(train), test), "the test data are tensors with uint8 images.*in one form"),
        (lambda train, test: (loader(train), loader(test)), "inputs are torch.uint8.*computes in torch.float32"),
        (lambda train, test: ((train[0].double(), train[1]), (test[0].double(), test[1])), "inputs are torch.float64"),
        (lambda train, test: (floats(train), loader(floats(test), shuffle=True)), "test loader shuffles"),
        (lambda train, test: (loader(floats(train), 999, drop_last=True), floats(test)), "loader gives no batch"),
        (lambda train, test: (floats(train), loader(floats(test), 999, drop_last=True)), "test data give no batch"),
        (lambda train, test: ((train[0].numpy(), train[1].numpy()), test), "are a tuple of ndarray, ndarray"),
        (lambda train, test: ((train[0], train[1] - 1), test), "a target is class -1"),
        (lambda train, test: ((train[0], train[1][:, None]), test), r"whole numbers of shape \(64, 1\)"),
        (lambda train, test: (train, loader(floats(test), sampler=SubsetRandomSampler(range(99)))), "test loader shuffles"),
        (lambda train, test: (train, loader(floats(test), sampler=WeightedRandomSampler([1.0] * 9, 9))), "loader shuffles"),
        (lambda train, test: (train, DataLoader(Pictures(test), batch_sampler=BatchSampler(RandomSampler(range(99)), 32, False))),
         "test loader shuffles"),
        (lambda train, test: (Pictures(train), Given(test, classes=list("bacdefghij"))), r"are 10 \(a, b, c.*10 \(b, a, c"),
        (lambda train, test: (one_hot(floats(train)), floats(test)), "training targets are numbers to hit, the test targets cl"),
        (lambda train, test: (floats(train), one_hot(floats(test))), "training targets are classes, the test targets numbers"),
        (lambda train, test: (Given(train, unlabelled), Pictures(test)), "a target is class -100"),
        (lambda train, test: (Pictures(train), Given(test, unlabelled)), "a target is class -100"),
        (lambda train, test: (loader(train), floats(test)), "inputs are torch.uint8.*computes in torch.float32"),
        (lambda train, test: (Given(train, sized), Pictures(test)), "training data cannot be put together in a batch.*one shape"),
        (lambda train, test: (Given(train, drawn), Pictures(test)), "training data cannot be put together in a batch"),
        (lambda train, test: ((train[0], train[1][0]), test), "256 inputs and 1 targets"),
        (lambda train, test: (Given((train[0][:0], train[1][:0])), Pictures(test)), "more than the 0 training images"),
        (lambda train, test: (DataLoader(Told(train, 128), 32), floats(test)), "more than the 4 batches that it says"),
        (lambda train, test: (floats(train), DataLoader(Told(test, 99, once=True), 999)), "can be gone through again"),
    ],
)  # fmt: skip
def test_data_that_would_be_misread_are_refused(wrong: Any, match: str, tmp_path: Path) -> None:
    train, test = digits()
    with pytest.raises(NestlingError, match=match):
        nestling.fit(nested(), *wrong(train, test), out=tmp_path / "mine", epochs=1, quiet=True, repeats=0)


def test_a_loss_that_passes_over_targets_is_told_of_them(tmp_path: Path) -> None:
    """torch's own passes over -100; the errors would count it as wrong."""
    train, test = digits()
    data = Pictures(train), Given(test, unlabelled)
    with pytest.raises(NestlingError, match="a target is class -100"):
        nestling.fit(nested(), *data, loss=nn.CrossEntropyLoss(), out=tmp_path, epochs=1, quiet=True, repeats=0)


def test_a_last_batch_of_one_is_told(tmp_path: Path) -> None:
    train, test = (floats(pair) for pair in digits(65))
    net = nestling.exits(backbone().eval(), at=(0.3,), shape=(1, 8, 8))
    with pytest.raises(NestlingError, match=r"a single input, which batch norms cannot take.*drop_last=True"):
        nestling.fit(net, loader(train), test, out=tmp_path / "mine", epochs=1, quiet=True, repeats=0)


def test_a_data_set_made_of_tensors_gives_its_own_samples(tmp_path: Path) -> None:
    """A class made of TensorDataset that changes what it gives, and names its classes."""

    class Shifted(TensorDataset):
        classes = tuple("abcdefghij")

        def __getitem__(self, index: Any) -> Any:
            x, y = super().__getitem__(index)
            return x, (y + 1) % 10

    train, test = (floats(pair) for pair in digits())
    shifted = ((x, (y + 1) % 10) for x, y in (train, test))
    runs = [
        nestling.fit(nested(), *data, out=tmp_path / str(i), epochs=1, quiet=True, repeats=0)
        for i, data in enumerate((shifted, (Shifted(*train), Shifted(*test))))
    ]
    assert errors_of(runs[0]) == errors_of(runs[1]) and runs[1].results["classes"] == list("abcdefghij")


@pytest.mark.parametrize(
    "said",
    [
        {"targets": range(1, 65)},
        {"targets": [-1] * 64},
        {"targets": [3] * 64, "target_transform": lambda y: y},
        {"labels": range(10)},
        {"classes": 10},
        {"classes": torch.arange(10)},
    ],
)
def test_what_data_tell_in_other_words_is_not_taken_for_ours(said: dict[str, Any], tmp_path: Path) -> None:
    """Targets that are numbered otherwise are no share of classes, and how many classes there are is no name of them."""
    train, test = digits(64)
    run = nestling.fit(
        nested(), Given(train, **said), floats(test), out=tmp_path, epochs=1, batch=32, quiet=True, repeats=0
    )
    assert run.results["prior"] == [] and len(run.results["classes"]) == 10
    with nestling.Runtime(run, device="cpu") as runtime:
        assert runtime.answer(floats(test)[0][0], deadline=None).stage > 0


def test_int8_is_judged_by_the_targets_that_the_data_give(tmp_path: Path) -> None:
    """Not by a list that the data keep beside them, in whatever order or none."""
    train, test = digits(64)
    for name, more in {"none": {}, "other": {"targets": [3] * len(test[0])}}.items():
        run = nestling.fit(
            nested(), floats(train), Given(test, **more), out=tmp_path / name, epochs=1, quiet=True, repeats=0
        )
        made = export.command(str(run.path), out=str(tmp_path / f"{name}-int8"), int8=True)
        assert made["about"]["int8"]["error_before"] == pytest.approx(errors_of(run))


class Two(nn.Module):
    """A teacher with an auxiliary answer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = backbone()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), torch.zeros(len(x), 10)


@pytest.mark.parametrize(
    ("teacher", "match"),
    [
        (Two(), "answers with a tuple; expected a tensor"),
        (backbone().double(), "computes in torch.float64.*convert it"),
    ],
)
def test_a_teacher_that_would_be_misread_is_refused(teacher: nn.Module, match: str, tmp_path: Path) -> None:
    train, test = (floats(pair) for pair in digits(64))
    with pytest.raises(NestlingError, match=match):
        nestling.fit(nested(), train, test, teacher=teacher, out=tmp_path, epochs=1, quiet=True, repeats=0)


@pytest.mark.parametrize("form", ["TensorDataset", "int32", "uint8"])
def test_the_same_data_in_other_forms_give_the_same_run(form: str, tmp_path: Path) -> None:
    kinds = {"int32": torch.int32, "uint8": torch.uint8}
    pairs = digits()
    others: Any = [
        TensorDataset(*pair) if form == "TensorDataset" else (pair[0], pair[1].to(kinds[form])) for pair in pairs
    ]
    runs = [
        nestling.fit(nested(), *data, out=tmp_path / str(i), epochs=1, quiet=True, repeats=0)
        for i, data in enumerate((pairs, others))
    ]
    assert runs[0].results["stages"] == runs[1].results["stages"] and runs[0].results["mean"] == runs[1].results["mean"]


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (nn.CrossEntropyLoss, r"is a class; hand over one of it, such as CrossEntropyLoss\(\)"),
        (nn.CrossEntropyLoss(reduction="none"), r"a tensor of shape \(64,\); expected a scalar"),
        (lambda found, y: 1.0, "gives a float; expected a scalar"),
        (lambda found, y: found.detach().mean(), "no stage's loss depends on a parameter that trains"),
    ],
)
def test_a_loss_that_is_none_is_refused(loss: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(NestlingError, match=match):
        nestling.fit(nested(), *digits(), loss=loss, out=tmp_path / "mine", epochs=1, quiet=True, repeats=0)


def test_test_inputs_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    train, test = (floats(pair) for pair in digits())
    test[0][3] = torch.nan
    with pytest.raises(NestlingError, match="look for such numbers among the test inputs"):
        nestling.fit(nested(), train, test, out=tmp_path / "mine", epochs=1, quiet=True, repeats=0)


def test_a_teacher_may_be_named_by_a_path_and_a_net_may_take_no_images(tmp_path: Path) -> None:
    train, test = digits(64)
    first = nestling.fit(nested(), train, test, out=tmp_path / "first", epochs=1, quiet=True, repeats=0)
    run = nestling.fit(
        nested(), train, test, teacher=first.path, out=tmp_path / "mine", epochs=1, quiet=True, repeats=0
    )
    assert run.recipe.train.teacher == str(first.path)
    (tmp_path / "folder").mkdir()
    net = nestling.nest(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2)), "w", shape=(12,))
    with pytest.raises(NestlingError, match="there is no folder"):
        nestling.fit(net, tmp_path / "folder", out=tmp_path / "flat")


def test_a_loaders_own_batch_counts_and_no_other_is_written_down(tmp_path: Path) -> None:
    train, test = (floats(pair) for pair in digits())
    with pytest.raises(NestlingError, match=r"train\.batch is 16, and the training loader's batches are of 32"):
        nestling.fit(nested(), loader(train), test, out=tmp_path / "other", set="train.batch=16", epochs=1, quiet=True)
    given = lambda: (loader(train), test)  # noqa: E731  a function, whose batches nobody knows before
    run = nestling.fit(nested(), given, out=tmp_path / "run", epochs=1, quiet=True, repeats=0)
    [line] = run.read_log()
    images = line["images_per_second"] * line["seconds"]
    assert images == pytest.approx(len(loader(train)) * 32, rel=0.1)


@pytest.mark.parametrize(("way", "pictures", "warned"), [("keep", True, 1), ("keep", False, 0), ("nest", True, 0)])
def test_pictures_for_a_network_that_knows_other_numbers_are_told(
    way: str, pictures: bool, warned: int, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    train, test = digits(64)
    if not pictures:
        train, test = floats(train), floats(test)
    make = nestling.keep if way == "keep" else nestling.nest
    nestling.fit(make(backbone(), shape=(1, 8, 8)), train, test, out=tmp_path / "run", epochs=1, repeats=0)
    assert sum("their answer is spoilt" in str(each.message) for each in recwarn) == warned


def test_one_class_is_refused(tmp_path: Path) -> None:
    (x, y), _ = (floats(pair) for pair in digits())
    net = nestling.nest(nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(288, 1)), "w", shape=(1, 8, 8))
    with pytest.raises(NestlingError, match="answers with one class"):
        nestling.fit(net, (x, 0 * y), (x, 0 * y), out=tmp_path / "one", epochs=1, quiet=True)


def test_a_single_setting_may_be_text(tmp_path: Path) -> None:
    run = nestling.fit(nested(), *digits(), out=tmp_path, epochs=3, set="train.epochs=1", quiet=True, repeats=0)
    assert len(run.read_log()) == 1


def test_what_a_run_was_not_trained_with_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    run = nestling.fit(nested(), "digits", out=tmp_path / "mine", epochs=1, quiet=True, repeats=0)
    assert nestling.resolve(run, data="digits").recipe.data.name == "digits"  # as it was said when training
    with pytest.raises(NestlingError, match="trained on digits, and is judged there, not on mine"):
        nestling.resolve(run, data="mine.py:loaders")
    with pytest.raises(NestlingError, match="build is for a network of your own"):
        nestling.resolve("width-resnet42-cifar10", build=nested)


SCRIPT = """
import torch, nestling
from pathlib import Path
from sklearn.datasets import load_digits
from torch import nn

with open("ran.txt", "a") as file:
    file.write("ran\\n")

def module():
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *head)

def trained():  # whoever calls it
    made = module()
    made(loaders()[0][0]).square().mean().backward()
    return made

def loaders():
    digits = load_digits()
    images, labels = torch.tensor(digits.images[:, None] / 16).float(), torch.tensor(digits.target)
    return (images[:256], labels[:256]), (images[1500:], labels[1500:])
"""


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nestling", *words, "--json"], cwd=folder, capture_output=True, text=True, check=False
    )


def test_the_command_line_trains_what_a_file_builds_and_runs_it_only_when_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    words = ("mine.py:module", "--data", "mine.py:loaders", "--way", 'nest("w")', "--set", "train.epochs=1", "--quiet")
    done = command(tmp_path, "train", *words, "--teacher", "mine.py:trained", "--out", "runs/mine")
    assert not done.returncode, done.stderr
    assert len(json.loads(done.stdout)["stages"]) == 2
    log = tmp_path / "ran.txt"
    log.unlink()
    refused = command(tmp_path, "evaluate", "runs/mine")
    assert refused.returncode == 1 and "--data mine.py:loaders" in json.loads(refused.stdout)["error"]
    refused = command(tmp_path, "train", "--resume", "runs/mine")
    assert "name it again" in json.loads(refused.stdout)["error"]
    assert not log.exists(), "code that a folder names was run unasked"
    found = command(tmp_path, "evaluate", "runs/mine", "--build", "mine.py:module", "--data", "mine.py:loaders")
    assert not found.returncode, found.stderr
    assert json.loads(found.stdout)["stages"] == json.loads(done.stdout)["stages"]
