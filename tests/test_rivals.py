"""Methods of others, each equal to a public implementation, or to the published formula where that one is not installed."""

from collections.abc import Callable
from itertools import chain, combinations

import pytest
import torch
import torch.nn.functional as F
from gradient_zoo import matrices, run
from test_gradients import assert_same, batch, gradients, losses_of, make
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.gradients import Accumulator, backward
from nestling.gradients.combiners import (
    DWA,
    FAMO,
    IMTLG,
    MGDA,
    RIVALS,
    AlignedMTL,
    CAGrad,
    GradNorm,
    NashMTL,
    SumSGD,
    Uncertainty,
    UPGrad,
)
from nestling.gradients.combiners.quadratic import minimise
from nestling.gradients.combiners.solved import Solved

ZOO = [(name, rows) for name, rows in matrices() if len(rows) > 1]
SOLVED: dict[str, Callable[[], Solved]] = {
    "upgrad": lambda: UPGrad("all"),
    "mgda": lambda: MGDA("all"),
    "cagrad": lambda: CAGrad(0.4, "all"),
    "nash-mtl": lambda: NashMTL("all"),
    "imtl-g": lambda: IMTLG("all"),
    "aligned-mtl": lambda: AlignedMTL("all"),
}
zoo = pytest.mark.parametrize(("name", "rows"), ZOO, ids=[name for name, _ in ZOO])


def weights_of(method: Solved, rows: Tensor) -> Tensor:
    _, report = run(rows, method)
    assert report.weights is not None
    return report.weights[0]


def subsets(n: int) -> list[tuple[int, ...]]:
    return list(chain.from_iterable(combinations(range(n), size) for size in range(n + 1)))


def by_trying(hessian: Tensor, linear: Tensor, simplex: bool) -> float:
    """The least value of a quadratic program, over all sets of entries that are not zero."""
    n, best = len(linear), float("inf")
    for free in map(list, subsets(n)):
        if simplex and not free:
            continue
        size = len(free)
        system, wanted = hessian[free][:, free], -linear[free]
        if simplex:
            side = torch.ones(size, 1, dtype=torch.float64)
            system = torch.cat([torch.cat([system, side], 1), torch.cat([side.T, torch.zeros(1, 1).double()], 1)])
            wanted = torch.cat([wanted, torch.ones(1, dtype=torch.float64)])
        x = torch.zeros(n, dtype=torch.float64)
        if size:
            x[free] = torch.linalg.pinv(system)[:size] @ wanted
        if (x >= -1e-9).all() and (not simplex or abs(float(x.sum()) - 1) < 1e-9):
            best = min(best, float(x @ hessian @ x / 2 + linear @ x))
    return best


@pytest.mark.parametrize("simplex", [True, False])
def test_quadratic_programs_are_solved_exactly(simplex: bool) -> None:
    g = torch.Generator().manual_seed(0)
    for case in range(300):
        n, rank = 2 + case % 5, 1 + case % 4
        root = torch.randn(n, max(rank, 1 if simplex else n), generator=g, dtype=torch.float64)
        hessian = root @ root.T
        linear = torch.randn(n, generator=g, dtype=torch.float64) * (case % 3)
        x = minimise(hessian, linear, simplex)
        assert (x >= 0).all() and (not simplex or float(x.sum()) == pytest.approx(1))
        value = float(x @ hessian @ x / 2 + linear @ x)
        assert value <= by_trying(hessian, linear, simplex) + 1e-9 * (1 + abs(value)), (case, n, rank)


@zoo
def test_mgda_is_the_shortest_vector_of_the_hull(name: str, rows: Tensor) -> None:
    gram = rows @ rows.T
    w = weights_of(MGDA("all"), rows)
    assert (w >= 0).all() and float(w.sum()) == pytest.approx(1)
    assert float((gram @ w).min()) >= float(w @ gram @ w) - 1e-9 * float(gram.max())
    weighting = pytest.importorskip("torchjd.aggregation").MGDA(epsilon=1e-12, max_iters=20_000).gramian_weighting
    theirs = weighting(gram)
    assert float(w @ gram @ w) <= float(theirs @ gram @ theirs) + 1e-12
    torch.testing.assert_close(w @ rows, theirs @ rows, atol=2e-2, rtol=0)


@zoo
def test_upgrad_is_the_mean_of_projections_on_the_dual_cone(name: str, rows: Tensor) -> None:
    gram = rows @ rows.T
    n = len(rows)
    known = gram / gram.trace() + 1e-4 * torch.eye(n, dtype=torch.float64) if gram.trace() > 0 else gram
    w = weights_of(UPGrad("all"), rows)
    exact = weights_of(UPGrad("all", regularise=0.0), rows)
    assert float((gram @ exact).min()) >= -1e-9 * float(gram.max() + 1)  # no conflict
    try:
        theirs = pytest.importorskip("torchjd.aggregation").UPGrad().gramian_weighting(gram)
    except ImportError:  # torchjd's UPGrad needs quadprog
        for u in torch.eye(n, dtype=torch.float64) / n:
            more = minimise(known, known @ u, False)
            assert float(more @ known @ more / 2 + more @ known @ u) <= by_trying(known, known @ u, False) + 1e-10
        return
    if gram.trace() >= 1e-4:
        torch.testing.assert_close(w, theirs, atol=1e-8, rtol=1e-7)


@zoo
def test_cagrad_is_the_authors_objective_at_its_least(name: str, rows: Tensor) -> None:
    """As in the authors' code, which asks scipy's SLSQP."""
    optimize = pytest.importorskip("scipy.optimize")
    c, n = 0.4, len(rows)
    gram = rows @ rows.T
    mean = torch.full((n,), 1 / n, dtype=torch.float64)
    radius = c * float((mean @ gram @ mean).clamp_min(0).sqrt())
    found = weights_of(CAGrad(c, "all", rescale=0), rows)
    if radius < 1e-9:
        return
    w = (found - mean) / (found - mean).sum().clamp_min(1e-300)

    def value(x: Tensor) -> float:
        return float(x @ gram @ mean + radius * (x @ gram @ x).clamp_min(0).sqrt())

    bounds, total = [(0, 1)] * n, {"type": "eq", "fun": lambda x: 1 - sum(x)}
    theirs = optimize.minimize(
        lambda x: value(torch.as_tensor(x)), mean.numpy(), bounds=bounds, constraints=total, tol=1e-12
    )
    if (found - mean).abs().max() > 0:
        assert (w >= -1e-9).all() and value(w) <= theirs.fun + 1e-6 * abs(theirs.fun)
    update = found @ rows
    assert float((update - mean @ rows).norm()) <= radius * (1 + 1e-6)  # in the ball
    torch.testing.assert_close(weights_of(CAGrad(c, "all"), rows), found / (1 + c**2))


@pytest.mark.parametrize("name", ["cagrad", "nash-mtl"])
def test_equal_to_torchjd_where_its_solver_is_installed(name: str) -> None:
    pytest.importorskip("cvxpy", reason="torchjd's CAGrad and NashMTL need cvxpy")
    aggregation = pytest.importorskip("torchjd.aggregation")
    rows = dict(ZOO)["three"]
    theirs = aggregation.CAGrad(c=0.4) if name == "cagrad" else aggregation.NashMTL(3, max_norm=0.0, optim_niter=300)
    ours = CAGrad(0.4, "all", rescale=0) if name == "cagrad" else NashMTL("all")
    torch.testing.assert_close(weights_of(ours, rows) @ rows, theirs(rows), atol=2e-3, rtol=2e-3)


def nash_cases() -> list[Tensor]:
    """Gradients of equal and of unequal lengths, up to 1 : 10,000, in agreement and in conflict."""
    generator, found = torch.Generator().manual_seed(0), []
    for n, decades, common in [(2, 0, 0), (3, 2, 0), (3, 4, 0), (5, 0, 3), (5, 2, 0), (4, 0, -2), (6, 1, 1), (8, 3, 0)]:
        lengths = 10 ** torch.linspace(-decades / 2, decades / 2, n, dtype=torch.float64)
        rows = torch.randn(n, 40, generator=generator, dtype=torch.float64) * lengths[:, None]
        found.append(rows + common * torch.randn(40, generator=generator, dtype=torch.float64))
    return found


def test_where_torchjds_nash_is_another_ours_is_the_solution() -> None:
    """G a = 1 / a holds for ours in every case; TorchJD's either is the same, or does not satisfy it, and its bargain is
    worse. The condition has one solution: it is the gradient of a convex function, zero at its least value alone."""
    found = []
    for rows in nash_cases():
        gram = rows @ rows.T
        ours = weights_of(NashMTL("all"), rows)
        assert float((ours * (gram @ ours) - 1).abs().max()) < 1e-6
        found.append((rows, gram, ours))
    pytest.importorskip("cvxpy", reason="torchjd's NashMTL needs cvxpy and ecos")
    aggregation = pytest.importorskip("torchjd.aggregation")
    others = 0
    for rows, gram, ours in found:
        aggregator = aggregation.NashMTL(len(rows), max_norm=0.0, optim_niter=300)
        update = aggregator(rows)
        theirs = torch.as_tensor(aggregator.weighting.prvs_alpha).double()
        if float((update - ours @ rows).norm() / (ours @ rows).norm()) < 1e-3:
            continue
        others += 1
        assert float((theirs * (gram @ theirs) - 1).abs().max()) > 1.0
        worse = [float(a @ gram @ a / 2 - a.log().sum()) for a in (theirs, ours)]
        assert worse[0] > worse[1] + 1.0
    assert others < len(found)


@zoo
def test_nash_is_where_every_task_gains_the_same_share(name: str, rows: Tensor) -> None:
    if torch.linalg.matrix_rank(rows) < len(rows):
        assert torch.isfinite(weights_of(NashMTL("all"), rows)).all()
        return
    for scale in (1e-8, 1.0, 1e8):
        gram = rows @ rows.T * scale**2
        a = weights_of(NashMTL("all"), rows * scale)
        assert (a > 0).all()
        torch.testing.assert_close(a * (gram @ a), torch.ones(len(rows), dtype=torch.float64), atol=1e-6, rtol=0)


@zoo
@pytest.mark.parametrize("method", ["imtl-g", "aligned-mtl"])
def test_closed_forms_are_torchjds(name: str, rows: Tensor, method: str) -> None:
    aggregation = pytest.importorskip("torchjd.aggregation")
    theirs = aggregation.IMTLG() if method == "imtl-g" else aggregation.AlignedMTL()
    found = weights_of(SOLVED[method](), rows) @ rows
    torch.testing.assert_close(found, theirs.gramian_weighting(rows @ rows.T) @ rows, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(SOLVED))
def test_heads_move_as_if_alone(name: str) -> None:
    """Scope "shared", the default: what one task alone uses gets its own gradient; the trunk gets the method's."""
    net = make("two tasks")
    method = RIVALS[name]()  # type: ignore[call-arg]
    losses = losses_of(net, *batch())
    alone = {
        head: torch.autograd.grad(losses[t], net.get_parameter(f"{head}.weight"), retain_graph=True)[0]
        for t, head in enumerate(("classify", "regress"))
    }
    trunk = list(net.get_submodule("encoder").parameters())
    rows = torch.stack(
        [torch.cat([g.flatten() for g in torch.autograd.grad(loss, trunk, retain_graph=True)]) for loss in losses]
    )
    backward(losses, net, method)
    for head, grad in alone.items():
        torch.testing.assert_close(net.get_parameter(f"{head}.weight").grad, grad)
    found = torch.cat([p.grad.flatten() for p in trunk if p.grad is not None])
    torch.testing.assert_close(found, weights_of(SOLVED[name](), rows.double()).float() @ rows, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", sorted(SOLVED))
@pytest.mark.parametrize("scope", ["all", "shared", "block", "tensor"])
def test_every_scope_with_and_without_rows(name: str, scope: str) -> None:
    net = make("tree").double()
    x, y = batch()
    found = []
    for mode in ("rows", "layers"):
        net.zero_grad()
        rows = Accumulator(net, RIVALS[name](scope=scope), mode=mode)  # type: ignore[call-arg]
        for _ in range(2):
            rows.backward(losses_of(net, x.double(), y))
        found.append(gradients(net))
    assert_same(found[1], found[0], atol=1e-6)
    assert all(grad is not None and grad.isfinite().all() for grad in found[0].values())


def test_torchjds_aggregators_leave_heads_alone_as_mtl_backward_does() -> None:
    aggregation, autojac = pytest.importorskip("torchjd.aggregation"), pytest.importorskip("torchjd.autojac")
    from nestling.gradients.combiners.torchjd import FromTorchJD

    torch.manual_seed(0)
    trunk, heads = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.ModuleList(nn.Linear(8, 4) for _ in range(3))
    x, y = torch.randn(5, 6), torch.randint(4, (5,))
    every = nn.ModuleList([trunk, heads])

    def losses() -> tuple[Tensor, list[Tensor]]:
        features = trunk(x)
        return features, [F.cross_entropy(head(features), y) for head in heads]

    for aggregator in (aggregation.AlignedMTL(), aggregation.ConFIG(), aggregation.TrimmedMean(trim_number=1)):
        every.zero_grad()
        features, found = losses()
        autojac.mtl_backward(found, features=features)
        autojac.jac_to_grad(trunk.parameters(), aggregator)
        wanted = gradients(every)
        for mode in ("rows", "layers"):
            every.zero_grad()
            backward(losses()[1], every, FromTorchJD(aggregator, scope="shared"), mode=mode)
            assert_same(gradients(every), wanted, atol=1e-5)
    with pytest.raises(NestlingError, match="needs whole rows"):
        FromTorchJD(aggregation.TrimmedMean(trim_number=1), scope="tensor")


# Weightings.


def trained(method: object, theirs: object, epochs: int = 4) -> None:
    """Two nets side by side, one by a weighting of ours, one by TorchJD's scalarizer of the same name."""
    ours, other = make("two tasks").double(), make("two tasks").double()
    learnt: list[list[Tensor]] = [list(m.parameters()) for m in (method, theirs)]  # type: ignore[attr-defined]
    if isinstance(method, FAMO):  # steps its logits itself
        learnt = [[], []]
    optimizers = [
        torch.optim.SGD([*net.parameters(), *extra], lr=0.1) for net, extra in zip((ours, other), learnt, strict=True)
    ]
    for epoch in range(epochs):
        method.set_epoch(epoch)  # type: ignore[attr-defined]
        for seed in range(3):
            x, y = batch(seed=seed)
            for optimizer in optimizers:
                optimizer.zero_grad()
            backward(losses_of(ours, x.double(), y), ours, method)  # type: ignore[arg-type]
            theirs(torch.stack(losses_of(other, x.double(), y))).backward()  # type: ignore[operator]
            for optimizer in optimizers:
                optimizer.step()
            if isinstance(method, FAMO):
                method.update(losses_of(ours, x.double(), y))
                theirs.update(torch.stack(losses_of(other, x.double(), y)))  # type: ignore[attr-defined]
        if isinstance(method, DWA):
            theirs.step()  # type: ignore[attr-defined]
    for p, q in zip(ours.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["dwa", "uncertainty", "famo"])
def test_weightings_train_as_torchjds_do(name: str) -> None:
    scalarization = pytest.importorskip("torchjd.scalarization")
    made = {
        "dwa": lambda: (DWA(2), scalarization.DWA(temperature=2.0)),
        "uncertainty": lambda: (Uncertainty(2), scalarization.UW(2)),
        "famo": lambda: (FAMO(2), scalarization.FAMO(2)),
    }
    trained(*made[name]())


def test_gradnorm_is_libmtls() -> None:
    """Its weights and the gradient of its learnt scales, as LibMTL writes them, from the second step's losses on."""
    net = make("two tasks").double()
    method = GradNorm(2, alpha=1.5)
    rows = Accumulator(net, method)
    first = torch.stack(losses_of(net, batch()[0].double(), batch()[1])).detach()
    rows.backward(losses_of(net, batch()[0].double(), batch()[1]))
    method.scale.grad = None
    with torch.no_grad():
        method.scale.add_(torch.tensor([0.3, -0.2]))
    x, y = batch(seed=5)
    losses = losses_of(net, x.double(), y)
    trunk = list(net.get_submodule("encoder").parameters())
    grads = torch.stack(
        [torch.cat([g.flatten() for g in torch.autograd.grad(loss, trunk, retain_graph=True)]) for loss in losses]
    )
    scale = method.scale.detach().clone().double().requires_grad_()
    loss_scale = 2 * torch.softmax(scale, -1)
    lengths = torch.norm(loss_scale.unsqueeze(1) * grads, p=2, dim=-1)
    rate = torch.stack(losses).detach() / first
    constant = (lengths.mean(0) * (rate / rate.mean()) ** 1.5).detach()
    (lengths - constant).abs().sum(0).backward()
    net.zero_grad()
    report = rows.backward(losses)
    assert report.weights is not None and method.scale.grad is not None and scale.grad is not None
    torch.testing.assert_close(report.weights[0], loss_scale.detach())
    torch.testing.assert_close(method.scale.grad.double(), scale.grad, atol=1e-6, rtol=1e-5)
    found = torch.cat([p.grad.flatten() for p in trunk if p.grad is not None])
    torch.testing.assert_close(found, loss_scale.detach() @ grads)


def test_weightings_refuse_what_they_cannot_follow() -> None:
    net = make("two tasks")
    rows = Accumulator(net, Uncertainty(2))
    rows.add(losses_of(net, *batch()))
    with pytest.raises(NestlingError, match="one micro-batch a step"):
        rows.add(losses_of(net, *batch()))
    with pytest.raises(NestlingError, match="with every task's loss"):
        backward([None, losses_of(net, *batch())[1]], net, DWA(2))
    with pytest.raises(NestlingError, match="found 2 losses, expected 3"):
        backward(losses_of(net, *batch()), net, FAMO(3))
    with pytest.raises(NestlingError, match="unknown scope"):
        MGDA("head")
    backward(losses_of(net, *batch()), net, DWA(2))
    found = gradients(net)
    net.zero_grad()
    backward(losses_of(net, *batch()), net, SumSGD())
    assert_same(found, gradients(net))  # until there are two epochs
