"""Networks that do not classify: masks, numbers, embeddings; and sequences. Nested, trained, asked, exported and reported."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nestling
from nestling import NestlingError
from nestling.commands import evaluate, export, predict, profile, report, train
from nestling.data import load
from nestling.nets.extended import Extended
from nestling.recipes.recipe import DataRecipe, TrainRecipe
from nestling.runs.goal import confusions, examined_otherwise, mean_iou, task_loss
from nestling.runtime.portable import Portable


def block(i: int, o: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, width: int = 16, classes: int = 11) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = block(1, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up2, self.up1 = (nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in (2 * width, width))
        self.join2, self.join1 = block(4 * width, 2 * width), block(2 * width, width)
        self.classes = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(self.pool(a))
        up = self.join2(torch.cat([self.up2(self.bottom(self.pool(b))), b], 1))
        found: Tensor = self.classes(self.join1(torch.cat([self.up1(up), a], 1)))
        return found


def pictures() -> tuple[Tensor, Tensor]:
    """Real digits as they lie in files, and what they are."""
    found: Any = load(DataRecipe(name="digits"))
    return torch.cat([found.train.images, found.test.images]), torch.cat([found.train.labels, found.test.labels])


def parts(x: Tensor, y: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])


def test_a_unet_from_pixels_to_a_report(tmp_path: Path) -> None:
    """Masks of real pixels: where it is dark the digit's class, elsewhere background."""
    torch.manual_seed(0)
    images, labels = pictures()
    masks = (labels[:, None, None] + 1) * (images[:, 0] > 127)
    train_part, test_part = parts(images, masks)
    module = UNet()
    net = nestling.nest(module, "w", shape=(1, 8, 8))
    run = nestling.fit(
        net, train_part, test_part, teacher=module, out=tmp_path / "unet", epochs=12, lr=0.2, quiet=True, repeats=5,
        set=("train.distill=0.01",),
    )  # fmt: skip
    rows = run.results["stages"]
    assert run.results["task"] == "pixels" and rows[-1]["iou"] > 0.4 and rows[-1]["error"] < 0.15
    assert rows[-1]["iou"] > run.results["teacher"]["iou"] + 0.2  # which has learnt nothing
    with torch.no_grad():
        x = (test_part[0].float() / 255 - run.results["mean"][0]) / run.results["std"][0]
        said = [logits.argmax(1) for logits in run.net()(x)]
    assert rows[1]["error"] == pytest.approx(float((said[1] != test_part[1]).float().mean()), abs=1e-5)
    with nestling.Runtime(run, device="cpu") as runtime:
        answer = runtime.answer(test_part[0][0], deadline=0.01).refine()
        assert answer.output is not None and answer.output.shape == (11, 8, 8) and answer.final and not answer.scored
        assert (answer.output.argmax(0) == said[1][0].numpy()).mean() > 0.98
        assert len(list(runtime.answers(test_part[0][0]))) == 2
        again = pickle.loads(pickle.dumps(answer))  # noqa: S301
        assert np.array_equal(again.output, answer.output) and "output=(11, 8, 8)" in repr(again)
        for wrong in (
            lambda: answer.confidence,
            lambda: runtime.stop_when_sure(),
            lambda: runtime.answer(images[0], confident=0.9),
        ):
            with pytest.raises(NestlingError, match="no classes"):
                wrong()
    folder = export.command(str(run.path))["folder"]
    with Portable(folder) as portable:
        found = portable.answer(test_part[0][0].numpy()).output
        assert found is not None and np.allclose(found, answer.output, atol=1e-4)
    assert [row["error"] for row in evaluate.command(str(run.path), device="cpu")["stages"]] == [
        row["error"] for row in rows
    ]
    evaluate.show(run.results | {"run": ""})
    profile.command(str(run.path), device="cpu", repeats=3)
    report.command((str(run.path),), str(tmp_path / "report.html"))
    assert "intersection over union" in (tmp_path / "report.md").read_text()


def test_predict_shows_masks(tmp_path: Path) -> None:
    from PIL import Image

    images, labels = pictures()
    masks = (labels[:, None, None] + 1) * (images[:, 0] > 127)
    net = nestling.nest(UNet(4), "", shape=(1, 8, 8))
    run = nestling.fit(net, *parts(images, masks), out=tmp_path / "unet", epochs=1, quiet=True, repeats=0)
    Image.fromarray(images[0, 0].numpy()).save(tmp_path / "digit.png")
    found = predict.command(str(run.path), (str(tmp_path / "digit.png"),), device="cpu")
    assert np.array(found["images"][0]["answer"]["output"]).shape == (11, 8, 8)
    predict.show(found)


def small(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        block(1, 8), nn.MaxPool2d(2), block(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, outputs)
    )


def test_numbers_are_hit(tmp_path: Path) -> None:
    images, _ = pictures()
    x = images.float() / 255
    ink = x.mean((1, 2, 3))[:, None]
    train_part, test_part = parts(x, ink)
    net = nestling.nest(small(1), "w", shape=(1, 8, 8))
    run = nestling.fit(net, train_part, test_part, out=tmp_path / "ink", epochs=6, quiet=True, repeats=0)
    found = [output.detach() for output in run.net()(test_part[0])]
    for row, output in zip(run.results["stages"], found, strict=True):
        left = float(((output - test_part[1]) ** 2).mean() / test_part[1].var(correction=0))
        assert row["error"] == pytest.approx(left, rel=1e-3)
    assert run.results["classes"] == [] and run.results["stages"][-1]["error"] < 1
    with nestling.Runtime(run, device="cpu") as runtime:
        answer = runtime.answer(test_part[0][0])
        assert answer.output is not None and float(answer.output[0]) == pytest.approx(float(found[-1][0]), abs=1e-5)
        assert answer.to_dict()["output"] == pytest.approx(answer.output.tolist()) and "class" not in answer.to_dict()
    report.command((str(run.path),), str(tmp_path / "report.html"))


def pull(found: Tensor, labels: Tensor) -> Tensor:
    found = F.normalize(found)
    return F.binary_cross_entropy_with_logits(8 * found @ found.T - 4, (labels[:, None] == labels).float())


def strangers(found: Tensor, labels: Tensor) -> Tensor:
    near = F.normalize(found) @ F.normalize(found).T - 2 * torch.eye(len(found))
    return (labels[near.argmax(1)] != labels).float()


def test_embeddings_by_a_loss_and_an_error_of_ones_own(tmp_path: Path) -> None:
    images, labels = pictures()
    train_part, test_part = parts(images.float() / 255, labels)
    net = nestling.nest(small(8), "w", shape=(1, 8, 8))
    run = nestling.fit(
        net, train_part, test_part, loss=pull, error=strangers, out=tmp_path / "mine", epochs=3, quiet=True, repeats=0
    )
    with torch.no_grad():
        expected = float(strangers(run.net()(test_part[0])[-1], test_part[1]).mean())
    assert run.results["stages"][-1]["error"] == pytest.approx(expected, abs=1e-4) and expected < 0.5
    with pytest.raises(NestlingError, match=r"from 0 \(right\) to 1 \(wrong\)"):
        nestling.fit(
            net,
            train_part,
            test_part,
            loss=pull,
            error=lambda found, y: found.sum(1),
            out=tmp_path / "wrong",
            epochs=1,
            quiet=True,
        )


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        body: Any = small(1)
        self.body = body[:-1]
        self.age, self.sex = nn.Linear(16, 1), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return torch.cat([self.age(h), self.sex(h)], 1)


@pytest.mark.parametrize(
    "way", [lambda m: nestling.nest(m, "w", shape=(1, 8, 8)), lambda m: nestling.keep(m, shape=(1, 8, 8))]
)
def test_several_heads_stand_side_by_side(way: Any, tmp_path: Path) -> None:
    """As docs/tasks.md has it: one tensor out, its columns in the module's order, taken apart by loss and error."""
    images, labels = pictures()
    x, module = images[:256].float() / 255, TwoHeads().eval()
    y = torch.stack([x.mean((1, 2, 3)), (labels[:256] > 4).float()], 1)

    def loss(found: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(found[:, 0], y[:, 0]) + F.cross_entropy(found[:, 1:], y[:, 1].long())

    def error(found: Tensor, y: Tensor) -> Tensor:
        return (found[:, 1:].argmax(1) != y[:, 1]).float()

    net = way(module).eval()
    with torch.no_grad():
        whole = net(x)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, net.answers(x), strict=True))
        assert all(torch.allclose(whole[s - 1], net.subnet(s)(x), atol=1e-6) for s in net.plan.answering)
        if isinstance(net, Extended):
            assert torch.equal(whole[-1], module(x))
        else:  # channels in another order, outputs in the same
            found = torch.cat([net.get_submodule(f"head2.{name}").weight for name in ("age", "sex")])
            wanted = torch.cat([module.age.weight, module.sex.weight])
            assert torch.equal(found.sort(1).values, wanted.sort(1).values)
    run = nestling.fit(
        net, (x, y), (x, y), loss=loss, error=error, out=tmp_path / "run", epochs=1, quiet=True, repeats=0
    )
    export.command(str(run.path), out=str(tmp_path / "made"))
    with nestling.Runtime(run, device="cpu") as runtime, Portable(str(tmp_path / "made")) as portable:
        answer, other = runtime.answer(x[0], deadline=None), portable.answer(x[0].numpy(), deadline=None)
        expected = run.net()(x[:1])[answer.stage - 1][0]
        assert torch.allclose(torch.as_tensor(answer.output), expected, atol=1e-5)
        assert answer.output is not None and other.output is not None
        assert np.allclose(other.output, answer.output, atol=1e-5)


def test_pictures_of_two_channels_are_shown(tmp_path: Path) -> None:
    """Such as spectrograms in stereo."""
    images, labels = pictures()
    x = images[:128].expand(-1, 2, -1, -1).float() / 255
    module = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    pair = x, labels[:128]
    run = nestling.fit(
        nestling.nest(module, "w", shape=(2, 8, 8)), pair, pair, out=tmp_path / "two", epochs=1, quiet=True
    )
    assert report.command((str(run.path),), str(tmp_path / "report.html"))


def test_sound_is_a_sequence(tmp_path: Path) -> None:
    """Tones of two pitches: what they are is told by class, as ever."""
    torch.manual_seed(0)
    pitch = torch.randint(0, 2, (256,))
    time = torch.arange(128) / 128
    x = torch.sin(2 * torch.pi * (5 + 10 * pitch[:, None]) * time + 6 * torch.rand(256, 1))[:, None]
    module = nn.Sequential(
        nn.Conv1d(1, 16, 9, stride=2), nn.BatchNorm1d(16), nn.ReLU(),
        nn.Conv1d(16, 16, 9, stride=2), nn.BatchNorm1d(16), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 2),
    )  # fmt: skip
    net = nestling.nest(module, "w", shape=(1, 128))
    run = nestling.fit(
        net,
        (x[:192], pitch[:192]),
        (x[192:], pitch[192:]),
        out=tmp_path / "tones",
        epochs=5,
        batch=16,
        quiet=True,
        repeats=3,
    )
    assert run.results["stages"][-1]["error"] < 0.1 and run.results["shape"] == [1, 128]
    folder = export.command(str(run.path))["folder"]
    with Portable(folder) as portable, nestling.Runtime(run, device="cpu") as runtime:
        assert portable.answer(x[200].numpy()).label == runtime.answer(x[200]).label
    report.command((str(run.path),), str(tmp_path / "report.html"))
    with pytest.raises(NestlingError, match="no pictures"):
        predict.command(str(run.path), ("nowhere.png",), device="cpu")


def test_intersection_over_union_by_hand() -> None:
    """Two classes and one that does not occur; a pixel that is not counted."""
    y = torch.tensor([[[0, 0], [1, -1]]])
    said = torch.tensor([[[[0, 1], [1, 0]]]])  # (stages, N, 2, 2)
    assert confusions(said, y, 3)[0].tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 0]]
    assert float(mean_iou(confusions(said, y, 3))[0]) == pytest.approx((1 / 2 + 1 / 2) / 2)
    scores = F.one_hot(said[0], 3).permute(0, 3, 1, 2).float()
    found = examined_otherwise(iter([((scores,), y)]), "pixels", TrainRecipe())
    assert float(found.errors[0]) == pytest.approx(1 / 3)


def test_pixels_that_do_not_count_change_no_number() -> None:
    """Neither an image of which nothing counts, nor how the images are put into batches; and classes beyond are refused."""
    scores = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([[[0, 1], [2, -1]], [[1, 1], [-1, -1]], [[2, -1], [-1, -1]], [[-1, -1], [-1, -1]]])

    def examined(batch: int) -> Any:
        parts = [((scores[i : i + batch],), y[i : i + batch]) for i in range(0, 4, batch)]
        return examined_otherwise(iter(parts), "pixels", TrainRecipe())

    expected = F.cross_entropy(scores, y.clamp(min=-1), ignore_index=-1)
    wrong = [float((scores[i].argmax(0) != y[i])[y[i] >= 0].float().mean()) for i in range(3)]
    for batch in (1, 3, 4):
        found = examined(batch)
        assert float(found.losses[0]) == pytest.approx(float(expected), abs=1e-6)
        assert float(found.errors[0]) == pytest.approx(sum(wrong) / 3, abs=1e-6)
    alone = scores[3:].clone().requires_grad_()
    loss = task_loss(TrainRecipe(smoothing=0.1), False)(alone, y[3:])
    loss.backward()
    assert loss.item() == 0 and alone.grad is not None and not alone.grad.any(), "nothing to learn from"
    with pytest.raises(NestlingError, match="no pixel of the test targets counts"):
        examined_otherwise(iter([((scores[3:],), y[3:])]), "pixels", TrainRecipe())


def test_masks_with_a_number_for_what_does_not_count_are_told(tmp_path: Path) -> None:
    """255 in the masks, as in many files, and a loss that passes over it: the errors would not."""
    images, _ = pictures()
    x, y = images[:64].float() / 255, (images[:64, 0] > 127).long()
    y[:, 0] = 255
    loader = DataLoader(TensorDataset(x, y), 32)
    net = nestling.nest(
        nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1)), "w", shape=(1, 8, 8)
    )
    with pytest.raises(NestlingError, match=r"is class 255.*pixels that do not count be -1"):
        nestling.fit(
            net, loader, loader, loss=nn.CrossEntropyLoss(ignore_index=255), out=tmp_path, epochs=1, quiet=True
        )


def test_scores_of_yes_and_no_are_no_numbers_to_hit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several labels at a time: it is said that the errors are no measure. A run whose errors are above 1 is opened even so."""
    images, labels = pictures()
    pair, net = (
        (images[:128].float() / 255, F.one_hot(labels[:128], 10).float()),
        nestling.nest(small(10), "w", shape=(1, 8, 8)),
    )
    run = nestling.fit(net, pair, pair, loss=nn.BCEWithLogitsLoss(), out=tmp_path, epochs=1, quiet=True)
    assert "say by error= how wrong each sample is" in capsys.readouterr().err
    assert run.results["stages"][0]["error"] > 1
    with nestling.Runtime(run, device="cpu") as runtime:
        assert runtime.answer(pair[0][0], deadline=None).stage > 0


def test_the_variance_that_is_left_is_of_each_number_around_its_own_mean() -> None:
    """Two numbers far apart: who always says their means has learnt nothing, and leaves all of it."""
    y = torch.stack([300 + torch.arange(8.0), torch.arange(8.0) / 10], 1)
    means = y.mean(0).expand(8, 2)
    found = examined_otherwise(iter([((means, y), y)]), "numbers", TrainRecipe())
    assert found.errors.tolist() == pytest.approx([1, 0])
    with pytest.raises(NestlingError, match="the 8 test targets are all the same"):
        examined_otherwise(iter([((means,), means)]), "numbers", TrainRecipe())


def test_targets_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    images, labels = pictures()
    x, y = images[:64].float(), labels[:64].float()
    with pytest.raises(NestlingError, match="expected one for each"):
        nestling.fit(nestling.nest(small(3), "w", shape=(1, 8, 8)), (x, y), (x, y), out=tmp_path / "mine", quiet=True)
    with pytest.raises(NestlingError, match="target is class 9, but the network answers with 3 classes"):
        pair = images[:64], labels[:64]
        nestling.fit(nestling.nest(small(3), "w", shape=(1, 8, 8)), pair, pair, out=tmp_path / "few", quiet=True)
    with pytest.raises(NestlingError, match="is for a network of your own"):
        train.command("digits-width", error="my_file.py:error")
