"""Augmentation, in-memory splits, the digits, the synthetic set and the fixed choice of images."""

import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nestling.commands.data import command
from nestling.data import DATASETS, DataSet, MemorySplit, load
from nestling.data import digits as digits_room
from nestling.data.augment import augment, draws, normalise
from nestling.data.dataset import channel_statistics, choose
from nestling.data.synthetic import make
from nestling.errors import NestlingError
from nestling.recipes.recipe import DataRecipe


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def in_memory(data: DataSet) -> tuple[MemorySplit, MemorySplit]:
    assert isinstance(data.train, MemorySplit) and isinstance(data.test, MemorySplit)
    return data.train, data.test


def plainly(image: Tensor, row: int, column: int, flip: bool, mean: Tensor, std: Tensor) -> Tensor:
    """The usual recipe for one image, word for word: zero-pad, crop, flip, normalise."""
    pad = max(abs(row), abs(column), 1)
    padded = torch.nn.functional.pad(image, (pad, pad, pad, pad))
    height, width = image.shape[1:]
    crop = padded[:, pad + row : pad + row + height, pad + column : pad + column + width]
    crop = crop.flip(2) if flip else crop
    return (crop.double() / 255 - mean[:, None, None].double()) / std[:, None, None].double()


@settings(max_examples=60, deadline=None)
@given(
    channels=st.integers(1, 4),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    n=st.integers(1, 6),
    seed=st.integers(0, 999),
)
def test_augment_is_pad_crop_flip_normalise(channels: int, height: int, width: int, n: int, seed: int) -> None:
    generator = seeded(seed)
    images = torch.randint(0, 256, (n, channels, height, width), dtype=torch.uint8, generator=generator)
    offsets = torch.randint(-4, 5, (n, 2), generator=generator)
    flips = torch.rand(n, generator=generator) < 0.5
    mean, std = torch.rand(channels, generator=generator), torch.rand(channels, generator=generator) + 0.1
    got = augment(images, offsets, flips, mean, std)
    assert got.dtype == torch.float32 and got.is_contiguous()
    for i in range(n):
        row, column = offsets[i].tolist()
        expected = plainly(images[i], row, column, bool(flips[i]), mean, std)
        torch.testing.assert_close(got[i].double(), expected, rtol=1e-5, atol=1e-5)


def test_augment_by_hand() -> None:
    image = torch.tensor([[[[0, 51], [102, 255]]]], dtype=torch.uint8)
    # One row down, mirrored: the first row shows 102 255 backwards, the second lies outside and is black.
    got = augment(image, torch.tensor([[1, 0]]), torch.tensor([True]), torch.tensor([0.5]), torch.tensor([0.5]))
    torch.testing.assert_close(got, torch.tensor([[[[1.0, -0.2], [-1.0, -1.0]]]]))


def test_augment_without_shift_or_flip_only_normalises() -> None:
    images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8, generator=seeded())
    mean, std = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.3, 0.4])
    still = augment(images, torch.zeros(5, 2, dtype=torch.long), torch.zeros(5, dtype=torch.bool), mean, std)
    assert torch.equal(still, normalise(images, mean, std))


def test_draws_cover_every_offset_and_half_the_flips() -> None:
    drawn = draws(20_000, seeded(), pad=4, flip=True)
    assert torch.equal(drawn.order.sort().values, torch.arange(20_000))
    for axis in (0, 1):
        counts = torch.bincount(drawn.offsets[:, axis] + 4, minlength=9)
        assert len(counts) == 9 and counts.min() > 0.9 * 20_000 / 9
    assert abs(drawn.flips.float().mean() - 0.5) < 0.02


def test_switching_augmentation_off_leaves_the_order_alone() -> None:
    one, other = seeded(), seeded()
    for _ in range(2):
        with_it, without = draws(50, one, pad=4, flip=True), draws(50, other)
        assert torch.equal(with_it.order, without.order)
        assert not without.flips.any() and not without.offsets.any()


def test_same_seed_same_batches_and_the_next_epoch_differs() -> None:
    train, _ = in_memory(load(DataRecipe("digits")))
    first, again, other = seeded(3), seeded(3), seeded(4)
    epochs = [[torch.cat([x for x, _ in train.batches(100, g)]) for _ in range(2)] for g in (first, again, other)]
    assert torch.equal(epochs[0][0], epochs[1][0]) and torch.equal(epochs[0][1], epochs[1][1])
    assert not torch.equal(epochs[0][0], epochs[0][1])
    assert not torch.equal(epochs[0][0], epochs[2][0])


def test_batches_leave_torchs_own_randomness_alone() -> None:
    before = torch.get_rng_state()
    for _ in load(DataRecipe("digits")).train.batches(500, seeded()):
        pass
    assert torch.equal(before, torch.get_rng_state())


def test_an_engine_using_epoch_and_augment_sees_what_batches_yields() -> None:
    train, _ = in_memory(load(DataRecipe("digits")))
    drawn = train.epoch(seeded(7))
    for i, (x, y) in enumerate(train.batches(64, seeded(7))):
        part = slice(64 * i, 64 * i + 64)
        chosen = drawn.order[part]
        by_hand = augment(train.images[chosen], drawn.offsets[part], drawn.flips[part], train.mean, train.std)
        assert torch.equal(x, by_hand) and torch.equal(y, train.labels[chosen])


def test_cutmix_pastes_the_box_of_the_image_before_and_shares_the_label_by_area() -> None:
    mixed, _ = in_memory(load(DataRecipe("digits", cutmix=0.5)))
    plain, _ = in_memory(load(DataRecipe("digits")))
    assert torch.equal(mixed.epoch(seeded()).order, plain.epoch(seeded()).order), "the order stays as it was"
    boxes = mixed.epoch(seeded()).boxes
    assert boxes is not None and 0.4 < (boxes[:, 0] < boxes[:, 2]).float().mean() < 0.6
    pairs = zip(mixed.batches(32, seeded()), plain.batches(32, seeded()), strict=True)
    for i, ((x, shares), (before, y)) in enumerate(pairs):
        for j, (top, left, bottom, right) in enumerate((boxes[32 * i : 32 * i + 32] * 8).round().long().tolist()):
            wanted, other = before[j].clone(), (j - 1) % len(y)
            wanted[:, top:bottom, left:right] = before[other, :, top:bottom, left:right]
            assert torch.equal(x[j], wanted)
            area = (bottom - top) * (right - left) / 64
            label = torch.zeros(10)
            label[y[j]] += 1 - area
            label[y[other]] += area
            assert torch.allclose(shares[j], label)
    _, hard = next(mixed.batches(32, seeded(), augment=False))
    assert hard.dtype == torch.int64, "nothing is mixed where nothing is augmented"
    for wrong in ({"name": "folder"}, {"augment": False}):
        with pytest.raises(NestlingError, match=r"data\.cutmix is 0\.5, which needs"):
            DataRecipe(**{"cutmix": 0.5, **wrong})  # type: ignore[arg-type]


def test_without_a_generator_batches_come_in_order_and_plain() -> None:
    train, test = in_memory(load(DataRecipe("digits")))
    for split in (train, test):
        got = list(split.batches(100))
        assert torch.equal(torch.cat([y for _, y in got]), split.labels)
        assert torch.equal(torch.cat([x for x, _ in got]), normalise(split.images, split.mean, split.std))
        assert [len(y) for _, y in got[:-1]] == [100] * (len(got) - 1)


def test_drop_last_and_augment_false() -> None:
    train, _ = in_memory(load(DataRecipe("digits")))
    assert [len(y) for _, y in train.batches(500, seeded(), drop_last=True)] == [500, 500]
    x, _ = next(train.batches(1437, seeded(), augment=False))
    assert torch.equal(x, normalise(train.images[train.epoch(seeded()).order], train.mean, train.std))
    plain, _ = in_memory(load(DataRecipe("digits", augment=False)))
    assert torch.equal(next(plain.batches(1437, seeded()))[0], x)


def test_a_normalised_training_split_has_mean_0_and_deviation_1() -> None:
    train, _ = in_memory(load(DataRecipe("digits")))
    x = torch.cat([x for x, _ in train.batches(1000)]).double()
    assert abs(x.mean()) < 1e-5 and abs(x.std() - 1) < 1e-4


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda s: s.batches(0), "batch size 0 is not possible"),
        (lambda s: s.batches(5000, drop_last=True), "no full batch of 5000 in a split of 1437 images"),
        (lambda s: s.batches(5, augment=True), "without a generator"),
    ],
)
def test_impossible_epochs_are_refused_at_once(ask, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(NestlingError, match=message):
        ask(load(DataRecipe("digits")).train)


def test_digits_are_the_real_ones() -> None:
    data = load(DataRecipe("digits"))
    train, test = in_memory(data)
    assert data.shape == (1, 8, 8) and data.classes == tuple("0123456789")
    assert (len(train), len(test)) == (1437, 360)
    assert train.images.dtype == torch.uint8 and train.images.min() == 0 and train.images.max() == 255
    assert set(torch.cat([train.images, test.images]).unique().tolist()) == {round(k * 255 / 16) for k in range(17)}
    # The split is fixed for all time: these are its first labels and its numbers per class.
    assert train.labels[:10].tolist() == FIRST_TRAIN and test.labels[:10].tolist() == FIRST_TEST
    assert test.labels.bincount().tolist() == [36, 36, 36, 36, 37, 36, 36, 36, 35, 36]
    assert data.mean == pytest.approx((0.30566,), abs=1e-5) and data.std == pytest.approx((0.37591,), abs=1e-5)


FIRST_TRAIN = [1, 2, 3, 4, 5, 6, 8, 9, 0, 1]
FIRST_TEST = [0, 7, 2, 4, 1, 5, 6, 9, 6, 4]


def test_digits_have_the_right_labels() -> None:
    """The nearest training image has the same label nearly always, which wrong labels would not allow."""
    train, test = in_memory(load(DataRecipe("digits")))
    distance = torch.cdist(test.images.flatten(1).float(), train.images.flatten(1).float())
    assert (train.labels[distance.argmin(1)] == test.labels).float().mean() > 0.97


def test_training_digits_move_by_one_pixel_at_most_and_are_never_mirrored() -> None:
    train, _ = in_memory(load(DataRecipe("digits")))
    drawn = train.epoch(seeded())
    assert drawn.offsets.abs().max() == 1 and not drawn.flips.any()


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(NestlingError, match=r"pip install 'nestling\[data\]'"):
        digits_room.read()


@settings(max_examples=30, deadline=None)
@given(n=st.integers(2, 300), validation=st.integers(0, 299), limit=st.integers(0, 299))
def test_choice_is_disjoint_and_a_limit_never_moves_the_held_out_part(n: int, validation: int, limit: int) -> None:
    recipe = DataRecipe("synthetic", validation=validation, limit=limit)
    if validation >= n or limit > n - validation:
        with pytest.raises(NestlingError, match="training images"):
            choose(n, recipe)
        return
    kept, held = choose(n, recipe)
    assert len(kept) == (limit or n - validation) and len(held) == validation
    assert len(set(kept.tolist()) | set(held.tolist())) == len(kept) + len(held)
    everything, held_without_limit = choose(n, replace(recipe, limit=n - validation))
    assert torch.equal(held, held_without_limit)
    assert torch.equal(kept, everything[: len(kept)] if validation or limit else torch.arange(n))


def test_the_fixed_shuffle_is_fixed() -> None:
    kept, held = choose(50_000, DataRecipe("cifar10", validation=5000))
    assert (len(kept), len(held)) == (45_000, 5000)
    assert kept[:5].tolist() == SHUFFLED_FIRST and held[-5:].tolist() == SHUFFLED_LAST


# What numpy's frozen RandomState gives; a change here would silently change every 45k/5k result.
SHUFFLED_FIRST = [25798, 25355, 48292, 2486, 40822]
SHUFFLED_LAST = [42124, 15042, 28043, 17125, 22191]


def test_validation_takes_the_place_of_the_test_split() -> None:
    whole, _ = in_memory(load(DataRecipe("digits")))
    train, held = in_memory(load(DataRecipe("digits", validation=137, limit=1000)))
    assert (len(train), len(held)) == (1000, 137)
    mine = {bytes(x.numpy().tobytes()) for x in held.images}
    assert mine <= {bytes(x.numpy().tobytes()) for x in whole.images}
    assert held.pad == 0 and not held.flip


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (DataRecipe("digits", validation=1437), "data.validation=1437 leaves nothing to train on"),
        (DataRecipe("digits", limit=1438), "data.limit=1438 is more than the 1437 training images of digits"),
        (DataRecipe("digits", limit=1438 - 100, validation=100), "data.limit=1338 is more than the 1337"),
    ],
)
def test_too_large_a_choice_is_refused(recipe: DataRecipe, message: str) -> None:
    with pytest.raises(NestlingError, match=message):
        load(recipe)


def test_an_unknown_data_set_names_the_nearest() -> None:
    with pytest.raises(NestlingError, match="unknown data set 'digit'; did you mean digits"):
        command("digit")
    with pytest.raises(NestlingError, match="cifar10"):
        DataRecipe("cifar")  # type: ignore[arg-type]
    with pytest.raises(NestlingError, match="needs no files, so --root /x means nothing"):
        command("digits", root="/x")


def test_every_data_set_a_recipe_may_name_can_be_loaded() -> None:
    from typing import get_args, get_type_hints

    assert set(DATASETS) == set(get_args(get_type_hints(DataRecipe)["name"]))


def test_the_command_describes_the_digits() -> None:
    result = command("digits")
    assert result["train"] == 1437 and result["test"] == 360 and result["shape"] == [1, 8, 8]


@settings(max_examples=15, deadline=None)
@given(classes=st.integers(2, 7), channels=st.integers(1, 3), side=st.integers(4, 12), seed=st.integers(0, 99))
def test_synthetic_images_of_any_shape_are_reproducible_and_learnable(
    classes: int, channels: int, side: int, seed: int
) -> None:
    images = make(140, 70, classes, (channels, side, side), seed)
    again = make(140, 70, classes, (channels, side, side), seed)
    assert images.train.shape == (140, channels, side, side) and images.train.dtype == torch.uint8
    assert torch.equal(images.train, again.train) and torch.equal(images.test, again.test)
    centres = torch.stack([images.train[images.train_labels == c].double().mean(0) for c in range(classes)])
    guess = torch.cdist(images.test.double().flatten(1), centres.flatten(1)).argmin(1)
    assert (guess == images.test_labels).float().mean() > 0.8


def test_synthetic_loads_like_any_other() -> None:
    data = load(DataRecipe("synthetic", validation=100, limit=300))
    assert (len(data.train), len(data.test), data.shape, len(data.classes)) == (300, 100, (3, 16, 16), 10)


def test_channel_statistics_agree_with_torch() -> None:
    images = torch.randint(0, 256, (50, 3, 5, 5), dtype=torch.uint8, generator=seeded())
    mean, std = channel_statistics(images)
    pixels = images.double() / 255
    assert mean == pytest.approx(pixels.mean((0, 2, 3)).tolist())
    assert std == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist())


def test_pictures_are_plain_bytes_for_people() -> None:
    _, test = in_memory(load(DataRecipe("digits")))
    assert torch.equal(test.pictures(torch.tensor([5, 0])), test.images[[5, 0]])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_same_seed_same_batches_on_the_gpu_and_inside_a_cuda_graph() -> None:
    train, _ = in_memory(load(DataRecipe("synthetic")))
    there, _ = in_memory(load(DataRecipe("synthetic"), "cuda"))
    pairs = zip(train.batches(100, seeded()), there.batches(100, seeded()), strict=True)
    for (x, y), (x_there, y_there) in pairs:
        assert x_there.is_cuda and torch.equal(x, x_there.cpu()) and torch.equal(y, y_there.cpu())
    drawn = there.epoch(seeded())
    position = torch.zeros((), dtype=torch.long, device="cuda")
    steps = torch.arange(64, device="cuda")

    def step() -> Tensor:
        here = position * 64 + steps
        chosen = drawn.order[here]
        return augment(there.images[chosen], drawn.offsets[here], drawn.flips[here], there.mean, there.std)

    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for i, (x, _) in enumerate(train.batches(64, seeded())):
        position.fill_(i)
        graph.replay()
        assert torch.equal(out.cpu(), x)
