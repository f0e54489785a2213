"""The kernels of the training step: interpreted here, for real where there is a GPU; and which parts of a plan they take."""

import copy
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import finding
from torch import Tensor
from torch.nn import grad

from nestling.kernels import Fused, elementwise, proof, suits
from nestling.kernels.backends import BACKENDS, choices, sm80, sm90, triton
from nestling.kernels.fused import Values, fits
from nestling.kernels.images import pixel_matrix, pixel_stride
from nestling.kernels.patterns import Unit, count_readers, fits_sum, items
from nestling.kernels.side_stream import JoinSideStream, SideStream
from nestling.kernels.weights import weight_gradient
from nestling.nets import NestedNet, build, ops, plan
from nestling.nets.draft import Draft
from nestling.nets.plan import Node, Plan
from nestling.nets.within import can_live_within, leads, within
from nestling.recipes.recipe import NetworkRecipe

HERE = Path(__file__).parent
ROOT = HERE.parent
CIFAR = [
    "width-resnet42",
    "even-resnet42",
    "depth-sparse98",
    "alternate-sparse98",
    "together-sparse98",
    "cascade-sparse98",
]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["interpreted_fused.py", "emulated_convs.py"])
def test_kernels_run_on_a_cpu_compute_what_they_should(script: str) -> None:
    pytest.importorskip("triton")
    if script.startswith("emulated") and not shutil.which("g++"):
        pytest.skip("needs a C++ compiler")
    ran = subprocess.run(
        [sys.executable, str(HERE / script)],
        capture_output=True,
        text=True,
        timeout=600,
        env=finding(HERE, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "comparisons held" in ran.stdout


@pytest.mark.parametrize("name", CIFAR)
def test_every_node_is_computed_once_and_after_what_it_reads(name: str) -> None:
    drawn = plan(NetworkRecipe(name=name))
    done, nodes = {drawn.input.name}, Counter[str]()
    for item in items(drawn):
        if isinstance(item, Unit):
            assert item.norm.reads[0] in done and (not item.shortcut or item.shortcut in done)
            parts = [item.norm.name, f"{item.norm.name}.relu", *([item.conv.name] if item.conv else []), item.gives]
            nodes.update(set(parts))
            done.add(item.gives)
        else:
            assert set(item.reads) <= done
            nodes.update([item.name])
            done.add(item.name)
    assert nodes == Counter(node.name for node in drawn.nodes[1:])
    assert set(drawn.heads) <= done


def test_all_but_the_stem_and_the_halving_convolutions_of_a_resnet_are_fused() -> None:
    found = [item for item in items(plan(NetworkRecipe(name="width-resnet42"))) if isinstance(item, Unit)]
    assert sum(unit.conv is not None for unit in found) == 40  # of 43
    assert sum(bool(unit.shortcut) for unit in found) >= 18  # of 21 sums


@pytest.mark.parametrize("name", CIFAR)
def test_stems_and_widened_shortcuts_are_taken_too(name: str) -> None:
    net = build(NetworkRecipe(name=name)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    fused = Fused(net)
    assert len(fused.stems) == sum(node.reads == (net.plan.input.name,) for node in net.plan.nodes)
    widened = {node.name for node in net.plan.nodes if -1 in getattr(node.op, "source", ())}
    assert widened and widened <= set(fused.tables)
    for there, back in fused.tables.values():
        assert all(back[channel] == place for place, channel in enumerate(there.tolist()) if channel >= 0)
        assert sum(back >= 0) == sum(there >= 0)


def test_values_are_handed_out_as_often_as_they_are_read_and_then_forgotten() -> None:
    drawn = plan(NetworkRecipe(name="depth-sparse98"))
    readers = count_readers(items(drawn), drawn.heads)
    norms, others = readers["stem"]
    assert norms == 1 and others >= 2
    values = Values(readers)
    values.put("stem", torch.zeros(1, 16, 8, 8))
    for _ in range(norms + others):
        values.take("stem")
    assert not values.handles


class Note(torch.autograd.Function):
    """A layer that writes down when its backward pass came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, name: str, notes: list[str]) -> Tensor:
        ctx.name, ctx.notes = name, notes
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.notes.append(ctx.name)
        x, weight = ctx.saved_tensors
        return grads[0] * weight, grads[0] * x, None, None


def test_gradients_made_on_the_side_stream_are_waited_for_once_and_last() -> None:
    notes: list[str] = []
    side: Any = SimpleNamespace(join=lambda: notes.append("join"), discard=lambda: None)
    weights = [torch.tensor(value, requires_grad=True) for value in (2.0, 3.0, 5.0, 7.0)]
    stem, frozen = torch.tensor(1.0, requires_grad=True), torch.tensor(11.0)
    seen: list[str] = []
    weights[0].register_hook(lambda _: seen.append(notes[-1]))
    for _ in range(2):  # the second is added to the first
        *joined, still = JoinSideStream.apply(side, *weights, frozen)
        assert all(each.requires_grad for each in joined) and not still.requires_grad
        x = Note.apply(torch.tensor(1.0), stem, "stem", notes)
        for name, weight in zip("abc", joined, strict=False):
            x = Note.apply(x, weight, name, notes)
        x.backward()
    assert notes == ["c", "b", "a", "stem", "join"] * 2 and seen == ["join", "join"]
    assert [None if w.grad is None else float(w.grad) for w in (*weights, stem)] == [30.0, 20.0, 12.0, None, 60.0]


class Lane:
    """A stream that only writes down what it is told; its events are numbers."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes, self.events = name, notes, 0

    def wait_stream(self, other: "Lane") -> None:
        self.notes.append(f"{self.name} after {other.name}")

    def wait_event(self, event: int) -> None:
        self.notes.append(f"{self.name} after {event}")

    def record_event(self) -> int:
        self.events += 1
        return self.events

    @contextmanager
    def entered(self, lane: "Lane") -> Iterator[None]:
        self.notes.append(f"in {lane.name}")
        yield


def test_the_side_stream_follows_the_pass_at_most_two_groups_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    main, lane = Lane("main", notes), Lane("side", notes)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lane.entered)
    side = SideStream(torch.device("cpu"))
    side.stream = lane  # type: ignore[assignment]
    for layer in range(32):
        side.submit(lambda items: notes.append(f"done {items[0]} to {items[-1]}"), layer)
    groups = [["side after main", "in side", f"done {i} to {i + 7}"] for i in (0, 8, 16, 24)]
    assert notes == [*groups[0], *groups[1], *groups[2], "main after 1", *groups[3], "main after 2"]
    assert [items[0] for _, items in side.running] == [16, 24], "held until they have been read"
    notes.clear()
    side.submit(lambda items: notes.append(f"done {items}"), 32)
    side.join()
    side.join()
    assert notes == ["side after main", "in side", "done [32]", "main after 3", "main after side"] and not side.running


def test_what_a_broken_pass_left_is_not_done_by_the_next() -> None:
    side, done = SideStream(torch.device("cpu")), list[Any]()
    side.submit(done.append, 1)
    weight = torch.ones(1, requires_grad=True)
    (joined,) = JoinSideStream.apply(side, weight)
    side.submit(done.append, 2)
    joined.sum().backward()
    assert done == [[2]]


def test_anomaly_detection_sees_finished_gradients() -> None:
    side, done = SideStream(torch.device("cpu")), list[Any]()
    with torch.autograd.set_detect_anomaly(True):
        side.submit(done.append, 1)
    assert done == [[1]]


def test_items_of_one_kind_are_done_together_and_at_the_latest_when_joined() -> None:
    done: list[list[int]] = []
    side = SideStream(torch.device("cpu"))
    for item in range(11):
        side.submit(done.append, item, "wide" if item < 9 else "narrow")
    assert done == [list(range(8)), [8]]
    side.join()
    side.join()
    assert done == [list(range(8)), [8], [9, 10]]


def test_channels_are_selected_by_eight_bytes_where_they_come_so() -> None:
    zeros, half = [-1] * 4, torch.bfloat16
    assert elementwise.runs([4, 5, 6, 7, *zeros, 0, 1, 2, 3], half) == [1, -1, 0]
    assert elementwise.runs([2, 3, -1, -1], torch.float32) == [1, -1]
    for table in ([3, 4, 5, 6, 7, 8, 9, 10], [0, 1, 2, 4], [-1, 0, 1, 2], [0, 1, -1, -1]):
        assert elementwise.runs(table, half) == table, "not whole runs"


def test_the_pixel_stride_of_an_image_of_one_pixel_is_that_of_its_images() -> None:
    wide = torch.zeros(4, 16, 1, 1)
    for image, stride in ((wide.mean((2, 3), keepdim=True), 16), (wide[:, :8], 16), (wide[:1, :8], 8)):
        assert pixel_stride(image) == stride
    laid = torch.zeros(4, 16, 2, 2).contiguous(memory_format=torch.channels_last)
    assert [pixel_stride(each) for each in (laid, laid[:, :8], laid[:, :8, :, :1])] == [16, 16, 32]
    assert pixel_matrix(wide.mean((2, 3), keepdim=True).bfloat16()).view(torch.int64).shape == (4, 4)


def parted() -> Plan:
    """Two stages that have no channel in common, though each has a block of the stem's."""
    draft = Draft("parted", (3, 8, 8))
    stem = draft.conv("stem", "input", (1,) * 8 + (2,) * 8)
    heads = []
    for stage, first in ((1, 0), (2, 8)):
        x = draft.select(f"part{stage}", stem, tuple(range(first, first + 8)), (stage,) * 8)
        x = draft.conv(f"conv{stage}", draft.relu(draft.norm(f"norm{stage}", x)), (stage,) * 8)
        heads.append(draft.head(stage, draft.relu(draft.norm(f"last{stage}", x)), 10))
    return draft.finish(heads, ("1", "2"))


def test_images_are_shared_only_by_stages_that_have_the_first_of_them() -> None:
    assert can_live_within(parted()) and not leads(parted(), 1, 2)
    for name in CIFAR:
        drawn = plan(NetworkRecipe(name=name))
        assert all(leads(drawn, stage, drawn.answering[-1]) for stage in drawn.answering), name


def test_no_kernels_on_a_cpu() -> None:
    assert not suits(build(NetworkRecipe(name="width-resnet42")), 128)


def laid(shape: tuple[int, int, int] = (3, 32, 32)) -> NestedNet:
    net = build(NetworkRecipe(name="width-resnet42"), shape=shape)
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def test_what_the_kernels_cannot_read_is_refused() -> None:
    net = laid()
    assert all(fits(each, 128) for each in (net, within(net, 1), within(net, 2)))
    assert not fits(build(NetworkRecipe(name="width-resnet42")), 128), "weights that are not channels last"
    assert not fits(laid().double(), 128), "weights that are not float32"
    assert not fits(net, 2**14), "more pixels than 32 bits can count"
    small = laid((3, 28, 28))  # 28, 14 and 7 pixels wide
    assert fits(small, 128) and not fits(small, 100), "pixels that do not fill whole tiles"


def one_stage(nodes: list[Node], head: str) -> Plan:
    made: list[tuple[str, ops.Operation]] = [("norm", ops.BatchNorm()), ("relu", ops.Map("relu"))]
    made += [("conv", ops.Conv((3, 3), (1, 1), (1, 1)))]
    start = [Node("input", ops.Input(), (), (1,) * 8, (8, 8))]
    for name, op in made:
        start.append(Node(name, op, (start[-1].name,), (1,) * 8, (8, 8)))
    return Plan("drawn", (*start, *nodes), (head,), ("all",))


def test_sums_that_stretch_an_image_are_left_to_torch() -> None:
    for size, channels in (((1, 1), 8), ((8, 8), 1)):
        drawn = one_stage([], "conv")
        start, *others = drawn.nodes
        mean = Node("mean", ops.Module(), ("input",), (1,) * channels, size)
        total = Node("total", ops.Zip("add"), ("mean", "conv"), (1,) * 8, (8, 8))
        drawn = Plan("drawn", (start, mean, *others, total), ("total",), ("all",))
        assert not fits_sum(drawn, total)
        assert [item.gives for item in items(drawn) if isinstance(item, Unit)] == ["conv"], "the sum is by itself"


def test_an_answer_is_not_hidden_inside_a_unit() -> None:
    total = Node("total", ops.Zip("add"), ("input", "conv"), (1,) * 8, (8, 8))
    assert [item.gives for item in items(one_stage([total], "total")) if isinstance(item, Unit)] == ["total"]
    for head, given in (("conv", "conv"), ("relu", "relu")):
        assert [item.gives for item in items(one_stage([total], head)) if isinstance(item, Unit)] == [given]
    assert not [item for item in items(one_stage([total], "norm")) if isinstance(item, Unit)]


def gradient(forward: object, net: NestedNet, x: Tensor, y: Tensor, half: bool) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        logits = forward(x)  # type: ignore[operator]
    loss = sum((torch.nn.functional.cross_entropy(each.float(), y) for each in logits), torch.zeros((), device="cuda"))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]).double()


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("name", "stage"),
    [(name, 0) for name in CIFAR] + [("width-resnet42", 1), ("width-resnet42", 2), ("even-resnet42", 3)],
)
def test_gradients_are_as_near_to_float32_as_torchs_own_in_bfloat16(name: str, stage: int) -> None:
    torch.manual_seed(0)
    nets = [build(NetworkRecipe(name=name), generator=torch.Generator().manual_seed(2)) for _ in range(3)]
    nets = [net.cuda().to(memory_format=torch.channels_last).train() for net in nets]  # type: ignore[call-overload]
    mine, half, full = (within(net, stage) if stage else net for net in nets)
    assert suits(mine, 128)
    x = torch.randn(128, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (128,), device="cuda")
    fused = gradient(Fused(mine), mine, x, y, True)
    theirs, exact = gradient(half, half, x, y, True), gradient(full, full, x, y, False)
    assert (fused - exact).norm() < 1.25 * (theirs - exact).norm()
    for a, b in zip(nets[0].buffers(), nets[2].buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)


@pytest.mark.cuda
def test_the_same_input_gives_the_same_bits() -> None:
    net = build(NetworkRecipe(name="width-resnet42")).cuda().to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    fused, twin, serial = (Fused(copy.deepcopy(net)) for _ in range(3))
    serial.side.stream = None  # weight gradients in the pass's own order
    x, y = torch.randn(128, 3, 32, 32, device="cuda"), torch.randint(0, 10, (128,), device="cuda")
    torch.backends.cudnn.deterministic = True
    try:
        first, *others = (gradient(each, each.net, x, y, True) for each in (fused, twin, serial))
    finally:
        torch.backends.cudnn.deterministic = False
    assert all(torch.equal(first, other) for other in others)


SHAPES = [(c * k, side) for k in (1, 2, 4) for c, side in ((8, 32), (16, 16), (32, 8))] + [(24, 32), (96, 8)]


@pytest.mark.cuda
@pytest.mark.parametrize(("channels", "side"), SHAPES)
def test_the_fastest_choice_of_tiles_is_right_or_another_is_taken(channels: int, side: int) -> None:
    like = torch.empty(128, channels, side, side, device="cuda", dtype=torch.bfloat16)
    like = like.contiguous(memory_format=torch.channels_last)
    found = {
        "forward": proof.for_forward(like, channels, normed=True),
        "back": proof.for_back(like, like),
        "weights": proof.for_weights(like, channels),
    }
    for way, choice in found.items():
        assert choice == choices(way, like, channels)[0], (  # type: ignore[arg-type]
            "right, but not the fastest: this compiler gets the fastest choice wrong"
        )
    in_cuda = sm80.CHANNELS + (sm90.CHANNELS if sm90.runs_on(like.device) else ())
    assert all((choice.backend is not triton) == (channels in in_cuda) for choice in found.values())
    there, back_again = found["forward"], found["back"]
    for seed in range(3):  # other numbers than the proof's own
        x, dy = (proof.random_image(like, channels, 10 * seed + i) for i in (5, 6))
        w = proof.random_weight(like, channels, channels)
        kernel = w.permute(0, 3, 1, 2)
        z, affine = proof.random_image(like, channels, 7), proof.random_affine(like, channels)
        h, y, _ = there.backend.forward(x, affine, w, channels, there.tiles)
        normed = proof.normed_by(affine, x)
        assert proof.close(h, normed)
        assert proof.close(y, torch.nn.functional.conv2d(normed, kernel, padding=1))
        back = torch.nn.functional.conv_transpose2d(dy, kernel, padding=1)
        g, _ = back_again.backend.back(dy, w, z, affine, back_again.tiles)
        scale, shift = affine[:2, None, :, None, None]
        assert proof.close(g, torch.where(z.float() * scale + shift > 0, back, 0))
        expected = grad.conv2d_weight(x, kernel.shape, dy, padding=1)
        assert proof.close(weight_gradient(x, dy, None, found["weights"]), expected)


@pytest.mark.cuda
def test_wrong_tiles_are_noticed_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    like = torch.empty(64, 16, 16, 16, device="cuda", dtype=torch.bfloat16)
    for backend in BACKENDS:
        right = backend.forward
        monkeypatch.setattr(backend, "forward", lambda *a, right=right, **k: tuple(2 * each for each in right(*a, **k)))
    with pytest.raises(proof.Miscompiled, match="wrong results"):
        proof.for_forward(like, 16, normed=True)
