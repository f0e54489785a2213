"""Combiners: equal to the paper's loops, the invariants of design, pinned values, orders, errors."""

import itertools

import pytest
import torch
from gradient_zoo import (
    blocks_of,
    literal_osgd,
    matrices,
    normalised,
    projected_on_originals,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nestling.errors import NestlingError
from nestling.gradients.combiners import COMBINERS, OSGD, SGD, Damped, NormOSGD, NormSGD, PCGrad, SumSGD, Weighted

EXAMPLES = max(100, settings.default.max_examples if settings.default else 0)
ZOO = matrices()
SCALES = [1e-10, 1e-3, 1.0, 1e4, 1e10]
SCOPES = ["all", "shared", "block", "tensor"]


def near(found: Tensor, wanted: Tensor, size: float | Tensor, tolerance: float = 1e-12) -> bool:
    return bool((found - wanted).norm() <= tolerance * max(float(size), 1e-300))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, list[int], list[int], Tensor]:
    """Integer rows (so that dependence is exact), an order, widths of parameters and who owns which entry."""
    n = draw(st.integers(1, 6))
    widths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    d = sum(widths)
    flat = draw(st.lists(st.integers(-3, 3), min_size=n * d, max_size=n * d))
    rows = torch.tensor(flat, dtype=torch.float64).view(n, d)
    for _ in range(draw(st.integers(0, 2))):  # dependent rows on purpose
        to, of, factor = draw(st.integers(0, n - 1)), draw(st.integers(0, n - 1)), draw(st.integers(-2, 2))
        rows[to] = factor * rows[of]
    owned = torch.tensor(draw(st.lists(st.booleans(), min_size=n * d, max_size=n * d))).view(n, d)
    if draw(st.booleans()):
        owned = torch.ones_like(owned)
    rows = torch.where(owned, rows, 0.0)
    return rows, list(draw(st.permutations(range(n)))), widths, owned


@settings(max_examples=EXAMPLES)
@given(cases(), st.sampled_from(SCOPES))
def test_osgd_equals_the_papers_loop(case: tuple[Tensor, list[int], list[int], Tensor], scope: str) -> None:
    rows, order, widths, owned = case
    wanted = torch.zeros(rows.shape[1], dtype=torch.float64)
    for columns in blocks_of(owned, widths, scope):
        wanted[columns] = literal_osgd(rows[:, columns], order, [1.0] * len(rows))
    found, _ = run(rows, OSGD(order=order, scope=scope), widths, owned, elementwise=True)
    assert near(found, wanted, rows.norm())


@settings(max_examples=EXAMPLES)
@given(cases(), st.sampled_from(SCOPES))
def test_normalised_osgd_equals_the_papers_loop(case: tuple[Tensor, list[int], list[int], Tensor], scope: str) -> None:
    rows, order, widths, owned = case
    owned[:, 0] = True  # every task owns something
    scaled, _ = normalised(rows, owned)
    wanted = torch.zeros(rows.shape[1], dtype=torch.float64)
    for columns in blocks_of(owned, widths, scope):
        wanted[columns] = literal_osgd(scaled[:, columns], order, [1.0] * len(rows))
    found, _ = run(rows, NormOSGD(order=order, scope=scope), widths, owned, elementwise=True)
    assert near(found, wanted, 1.0)


@settings(max_examples=EXAMPLES)
@given(cases(), st.lists(st.floats(0.1, 10), min_size=6, max_size=6))
def test_importance_scales_the_orthogonalised_rows(
    case: tuple[Tensor, list[int], list[int], Tensor], k: list[float]
) -> None:
    rows, order, widths, owned = case
    k = k[: len(rows)]
    found, _ = run(rows, OSGD(order=order, importance=k), widths, owned, elementwise=True)
    assert near(found, literal_osgd(rows, order, k), 10 * rows.norm())


@settings(max_examples=EXAMPLES)
@given(cases())
def test_normsgd_is_the_mean_over_owners(case: tuple[Tensor, list[int], list[int], Tensor]) -> None:
    rows, _, widths, owned = case
    owned[:, 0] = True
    scaled, _ = normalised(rows, owned)
    count = owned.sum(0).clamp_min(1)
    found, _ = run(rows, NormSGD(), widths, owned, elementwise=True)
    assert near(found, scaled.sum(0) / count, 1.0)


@settings(max_examples=EXAMPLES)
@given(cases(), st.sampled_from(sorted(COMBINERS)))
def test_given_owners_and_the_graph_agree(case: tuple[Tensor, list[int], list[int], Tensor], name: str) -> None:
    """Where ownership is per parameter, finding it from the graph changes nothing."""
    rows, _, widths, owned = case
    owned[:, 0] = True
    firsts = [sum(widths[:i]) for i in range(len(widths))]
    owned = torch.cat([owned[:, f : f + 1].expand(-1, w) for f, w in zip(firsts, widths, strict=True)], 1)
    rows = torch.where(owned, rows, 0.0)
    combine = PCGrad(shuffle=False) if name == "pcgrad" else COMBINERS[name]()
    given_, _ = run(rows, combine, widths, owned, elementwise=True)
    found, _ = run(rows, combine, widths, owned, elementwise=False)
    assert near(found, given_, rows.norm())


def test_projection_onto_originals_is_something_else_from_three_tasks_on() -> None:
    for name, rows in ZOO:
        if name in ("two", "three", "six"):
            found, _ = run(rows, OSGD())
            gap = (found - projected_on_originals(rows)).norm() / found.norm()
            assert gap < 1e-12 if len(rows) == 2 else gap > 1e-4, name
    four = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.float64)
    found, _ = run(four, OSGD())
    assert (found - projected_on_originals(four)).norm() > found.norm()  # off by more than 100 %


def test_hand_computed_update() -> None:
    rows = torch.tensor([[2.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    found, report = run(rows, OSGD())  # g2 - (2/4) g1 = (0, 1)
    assert found.tolist() == [2.0, 1.0]
    assert report.weights is not None and report.weights.tolist() == [[0.5, 1.0]]
    found, _ = run(rows, OSGD(order=[1, 0]))  # g1 - (2/2) g2 = (1, -1)
    assert found.tolist() == [2.0, 0.0]


# The invariants of the design, over the zoo and ten powers of ten either way.


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("name", "rows"), ZOO, ids=[name for name, _ in ZOO])
class TestInvariants:
    def test_first_task_moves_as_if_alone(self, name: str, rows: Tensor, scale: float) -> None:
        g, _ = run(rows * scale, OSGD())
        first = rows[0] * scale
        assert abs(g @ first - first @ first) <= 1e-9 * (first.norm() * (rows * scale).norm() + 1e-300)

    def test_orthogonalised_rows_are_orthogonal_to_earlier_originals(
        self, name: str, rows: Tensor, scale: float
    ) -> None:
        rows = rows * scale
        updates = [run(rows[: i + 1], OSGD())[0] for i in range(len(rows))]
        for i, j in itertools.combinations(range(len(rows)), 2):
            tilde = updates[j] - updates[j - 1]  # the last task's contribution
            assert abs(tilde @ rows[i]) <= 1e-9 * (rows.norm() * rows[i].norm() + 1e-300)

    def test_rescaling_an_earlier_task_leaves_later_contributions(self, name: str, rows: Tensor, scale: float) -> None:
        if len(rows) < 2:
            pytest.skip("needs an earlier and a later task")
        rows = rows * scale

        def last(given: Tensor) -> Tensor:
            return run(given, OSGD())[0] - run(given[:-1], OSGD())[0]

        louder = rows.clone()
        louder[0] *= 1000
        assert near(last(louder), last(rows), 1001 * rows.norm())

    def test_last_task_has_weight_one(self, name: str, rows: Tensor, scale: float) -> None:
        for order in ([*range(len(rows))], [*range(len(rows))][::-1]):
            _, report = run(rows * scale, OSGD(order=order))
            assert report.weights is not None and float(report.weights[0, order[-1]]) == 1.0

    @pytest.mark.parametrize("method", sorted(COMBINERS))
    def test_the_update_is_finite_and_lies_in_the_span(
        self, name: str, rows: Tensor, scale: float, method: str
    ) -> None:
        found, _ = run(rows * scale, COMBINERS[method]())
        assert torch.isfinite(found).all()
        if rows.norm() > 0:
            basis = torch.linalg.svd(rows, full_matrices=False)
            span = basis.Vh[1e-9 * basis.S[0] < basis.S]
            assert near(span.T @ (span @ found), found, found.norm(), 1e-9)

    @pytest.mark.parametrize("method", ["sgd", "sgd-sum", "osgd", "pcgrad"])
    def test_scaling_all_losses_scales_the_update(self, name: str, rows: Tensor, scale: float, method: str) -> None:
        make = (lambda: PCGrad(shuffle=False)) if method == "pcgrad" else COMBINERS[method]
        assert near(run(rows * scale, make())[0], scale * run(rows, make())[0], scale * rows.norm())

    @pytest.mark.parametrize("method", ["normsgd", "osgd-norm"])
    def test_normalised_methods_ignore_the_scale_of_each_loss(
        self, name: str, rows: Tensor, scale: float, method: str
    ) -> None:
        uneven = scale ** torch.linspace(0, 1, len(rows), dtype=torch.float64)[:, None]
        assert near(run(rows * uneven, COMBINERS[method]())[0], run(rows, COMBINERS[method]())[0], 1.0, 1e-9)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("method", ["osgd", "pcgrad", "sgd-sum"])
def test_orthogonal_gradients_give_the_plain_sum(method: str, scope: str) -> None:
    rows = dict(ZOO)["orthogonal"]
    combine = COMBINERS[method]()
    combine.scope = scope
    found, _ = run(rows, combine)
    assert near(found, rows.sum(0), rows.norm())


PINNED = torch.tensor([[-4.0, 1.0, 1.0], [6.0, 1.0, 1.0], [0.0, 2.0, -1.0]], dtype=torch.float64)
# Gram [[18, -22, 1], [-22, 38, 1], [1, 1, 5]]. By hand, g2~ = g2 + 22/18 g1 = (10, 20, 20)/9, g3~ = (0, 3, -3)/2.
A, B, C = 18**0.5, 38**0.5, 5**0.5  # the norms
PINS: dict[str, list[float]] = {
    "damped": [-4, 1, 1],
    "sgd": [2 / 3, 4 / 3, 1 / 3],
    "sgd-sum": [2, 4, 1],
    "normsgd": [(-4 / A + 6 / B) / 6, (1 / A + 1 / B + 2 / C) / 6, (1 / A + 1 / B - 1 / C) / 6],
    "osgd": [-26 / 9, 85 / 18, 31 / 18],
    "osgd-norm": [
        (-4 / A + 10 / 9 / B) / 2,
        (1 / A + 20 / 9 / B + 1.5 / C) / 2,
        (1 / A + 20 / 9 / B - 1.5 / C) / 2,
    ],
    "pcgrad": [6 - 4 + 22 / 18 * -4 + 22 / 38 * 6, 4 + 22 / 18 + 22 / 38, 1 + 22 / 18 + 22 / 38],
}


@pytest.mark.parametrize("name", sorted(COMBINERS))
def test_pinned_matrix(name: str) -> None:
    combine = PCGrad(shuffle=False) if name == "pcgrad" else COMBINERS[name]()
    assert run(PINNED, combine)[0].tolist() == pytest.approx(PINS[name], abs=1e-7)


@settings(max_examples=EXAMPLES)
@given(cases(), st.sampled_from([0.0, 0.25, 1.0]))
def test_damping_softens_what_later_tasks_say_to_entries_of_earlier_ones(
    case: tuple[Tensor, list[int], list[int], Tensor], damping: float
) -> None:
    rows, _, widths, owned = case
    wanted = torch.zeros(rows.shape[1], dtype=torch.float64)
    for entry in range(rows.shape[1]):
        first, *later = owned[:, entry].nonzero().flatten().tolist() or [0]
        wanted[entry] = rows[first, entry] + damping * sum(rows[task, entry] for task in later)
    found, _ = run(rows, Damped(damping), widths, owned, elementwise=True)
    assert near(found, wanted, rows.norm())


def test_damping_is_a_share() -> None:
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(NestlingError, match="damping is"):
            Damped(wrong)


@pytest.mark.parametrize("combine", [NormSGD(), NormOSGD()])
def test_a_zero_gradient_has_weight_zero_where_gradients_are_normalised(combine: Weighted) -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    found, report = run(rows, combine)
    assert report.weights is not None and report.weights[0, 1].item() == 0.0
    assert found.norm().item() == pytest.approx(0.25 if isinstance(combine, NormSGD) else 0.5)


def test_pcgrad_takes_every_order_in_time() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor([[1.0, 0.0], [-1.0, 0.2], [-0.5, -1.0]], dtype=torch.float64)
    seen = {tuple(run(rows, PCGrad(generator=generator))[0].tolist()) for _ in range(60)}
    assert len(seen) > 1


def seeded(seed: int, epoch: int, steps: int, before: int = 0) -> list[tuple[float, ...]]:
    """The updates of some steps of an epoch, after some of another, with rows that show the order of projections."""
    combine = PCGrad(seed=seed)
    rows = torch.tensor([[1.0, 0.0], [-1.0, 0.2], [-0.5, -1.0]], dtype=torch.float64)
    for _ in range(before):
        run(rows, combine)
    combine.set_epoch(epoch)
    return [tuple(run(rows, combine)[0].tolist()) for _ in range(steps)]


def test_seeded_pcgrad_follows_from_seed_epoch_and_step_alone() -> None:
    torch.manual_seed(1)
    first = seeded(seed=3, epoch=5, steps=40)
    torch.manual_seed(2)
    assert seeded(seed=3, epoch=5, steps=40, before=7) == first, "whatever torch's generator and this one did before"
    assert seeded(seed=3, epoch=6, steps=40) != first != seeded(seed=4, epoch=5, steps=40)
    assert len(set(first)) == len(set(seeded(seed=0, epoch=0, steps=200))) > 1, "every order that matters comes"


def test_seeded_pcgrad_without_epochs_is_in_the_first() -> None:
    assert seeded(seed=3, epoch=0, steps=5, before=2) == seeded(seed=3, epoch=0, steps=5)


def test_seeded_pcgrad_goes_on_after_its_last_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestling.gradients.combiners.pcgrad.DRAWN", 5)
    found = seeded(seed=3, epoch=5, steps=12)
    assert found[5:10] == found[:5] and found[10:] == found[:2]


def test_pcgrad_refuses_two_sources_of_chance() -> None:
    with pytest.raises(NestlingError, match="a generator and a seed"):
        PCGrad(generator=torch.Generator(), seed=0)


@pytest.mark.parametrize("seed", range(3))
def test_float32_rows_lose_nothing_at_nearly_equal_directions(seed: int) -> None:
    """At cosine 1 - 5e-5 float32 sums lose 4e-5 of the update; float64 sums of float32 rows do not."""
    g = torch.Generator().manual_seed(seed)
    base, noise = torch.randn(1, 200_000, generator=g), torch.randn(3, 200_000, generator=g)
    rows = base + 0.01 * noise
    found, report = run(rows, OSGD())
    assert 1e-6 < float(1 - report.cosines[0, 1]) < 2e-4
    wanted = literal_osgd(rows.double(), [0, 1, 2], [1, 1, 1])
    assert float((found.double() - wanted).norm() / wanted.norm()) < 2e-6


def test_order_may_depend_on_the_epoch() -> None:
    rows = dict(ZOO)["three"]
    combine = OSGD(order=lambda epoch: [epoch % 3, (epoch + 1) % 3, (epoch + 2) % 3])
    for epoch in range(4):
        combine.set_epoch(epoch)
        fixed = OSGD(order=[epoch % 3, (epoch + 1) % 3, (epoch + 2) % 3])
        assert torch.equal(run(rows, combine)[0], run(rows, fixed)[0])


@pytest.mark.parametrize("scope", SCOPES)
def test_report_says_what_was_kept(scope: str) -> None:
    rows = torch.tensor([[2.0, 0.0, 0.0], [1.0, 1.0, 0.0]], dtype=torch.float64)
    owned = torch.tensor([[True, True, False], [True, True, True]])
    _, report = run(rows, OSGD(scope=scope), [2, 1], owned, elementwise=True)
    assert report.norms.tolist() == pytest.approx([2.0, 2**0.5])
    assert report.cosines[0, 1].item() == pytest.approx(0.5**0.5)
    assert report.kept.tolist() == pytest.approx([1.0, 0.5**0.5])


def test_report_shows_flipped_heads() -> None:
    """Under scope all an early head may be moved against its own gradient; under shared it never is."""
    rows = torch.tensor([[1.0, 1.0, 0.0], [5.0, 0.0, 1.0]], dtype=torch.float64)
    owned = torch.tensor([[True, True, False], [True, False, True]])
    _, report = run(rows, OSGD(), [1, 1, 1], owned, elementwise=True)  # w = (1 - 5/2, 1)
    assert report.flips.tolist() == [True, False]
    _, report = run(rows, OSGD(scope="shared"), [1, 1, 1], owned, elementwise=True)
    assert report.flips.tolist() == [False, False]
    assert set(report.numbers()) == {"weights", "norms", "cosines", "kept", "flips"}


@pytest.mark.parametrize(
    ("combine", "words"),
    [
        (lambda: OSGD(order=[0, 0, 1]), "permutation"),
        (lambda: OSGD(order=[0, 1]), "permutation"),
        (lambda: OSGD(order=[1, 2, 3]), "permutation"),
        (lambda: OSGD(order=lambda epoch: [0]), "permutation"),
        (lambda: OSGD(scope="tensors"), "did you mean tensor"),
        (lambda: OSGD(importance=[1, 2]), "importance has 2 numbers for 3 losses"),
        (lambda: SGD(importance=[1, 2]), "importance has 2 numbers for 3 losses"),
        (lambda: SumSGD(importance=[1, -2, 1]), "importance of task 1"),
        (lambda: SGD(importance=[0, 0, 0]), "at least one above zero"),
        (lambda: NormSGD(constant=0), "constant C"),
    ],
)
def test_wrong_settings_are_refused_in_words(combine: object, words: str) -> None:
    assert callable(combine)
    with pytest.raises(NestlingError, match=words):
        run(dict(ZOO)["three"], combine())


# TorchJD, both ways.


def test_torchjd_aggregators_combine_our_rows() -> None:
    aggregation = pytest.importorskip("torchjd.aggregation")
    from nestling.gradients.combiners.torchjd import FromTorchJD

    names = ["Sum", "Mean", "IMTLG", "ConFIG", "MGDA", "AlignedMTL"]
    made = [*(getattr(aggregation, name)() for name in names), aggregation.TrimmedMean(trim_number=1)]
    rows = dict(ZOO)["opposed"]
    owned = torch.ones_like(rows, dtype=torch.bool)
    owned[0, 8:] = False
    rows = torch.where(owned, rows, 0.0)
    for aggregator in made:
        found, report = run(rows, FromTorchJD(aggregator), [4, 4, 4], owned)
        assert near(found, aggregator(rows), rows.norm(), 1e-6), aggregator
        assert report.cosines.shape == (3, 3)


@pytest.mark.parametrize(("name", "rows"), ZOO, ids=[name for name, _ in ZOO])
def test_osgd_is_a_torchjd_aggregator(name: str, rows: Tensor) -> None:
    pytest.importorskip("torchjd")
    from torchjd.autojac import backward, jac_to_grad

    from nestling.gradients.combiners.torchjd import OSGDAggregator

    order = list(range(len(rows)))[::-1]
    wanted, _ = run(rows, OSGD(order=order))
    assert near(OSGDAggregator(order=order)(rows), wanted, rows.norm(), 1e-9)
    p = torch.zeros(rows.shape[1], dtype=torch.float64, requires_grad=True)
    backward([(row * p).sum() for row in rows], parallel_chunk_size=1)
    jac_to_grad([p], OSGDAggregator(order=order))
    assert p.grad is not None and near(p.grad, wanted, rows.norm(), 1e-9)
