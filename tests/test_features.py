"""Gradients at a representation, owners said outright, many losses, and reports for a log."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gradient_zoo import literal_osgd
from test_gradients import assert_same, batch, gradients, losses_of, make
from torch import Tensor, nn

import nestling
from nestling.errors import NestlingError
from nestling.gradients import backward, owners_from
from nestling.gradients.combiners import IMTLG, MGDA, OSGD, NormSGD, SumSGD
from nestling.gradients.combiners.weighted import Weighted


class Trunk(nn.Module):
    """Counts the passes that come back through it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(5, 4) for _ in range(3))
        self.passes = 0

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        inner = self.body[0](x)
        inner.register_hook(self._count)
        features = self.body[1:](inner)
        return features, [F.cross_entropy(head(features), y) for head in self.heads]

    def _count(self, grad: Tensor) -> None:
        self.passes += 1


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    return torch.randn(8, 6, generator=g), torch.randint(4, (8,), generator=g)


@pytest.mark.parametrize("combine", [lambda: MGDA(), lambda: IMTLG(), lambda: OSGD(scope="shared")])
def test_tasks_are_combined_by_their_gradients_at_the_features(combine: Callable[[], Weighted]) -> None:
    """MGDA-UB: the update is that of a leaf in place of the features, carried on by one pass."""
    net = Trunk()
    features, losses = net(*data())
    report = backward(losses, net, combine(), features=features)
    assert net.passes == 1
    found = gradients(net)
    net.zero_grad()
    features, _ = net(*data())
    leaf = features.detach().requires_grad_()
    losses = [F.cross_entropy(head(leaf), data()[1]) for head in net.heads]
    wanted = backward(losses, [("leaf", leaf), *net.heads.named_parameters(prefix="heads")], combine())
    features.backward(leaf.grad)
    assert_same(found, gradients(net))
    assert report.weights is not None and wanted.weights is not None
    torch.testing.assert_close(report.weights, wanted.weights)


def test_equal_to_torchjds_features() -> None:
    """Summed tasks at the features are the plain backward; several features, and given by name."""
    net = Trunk().double()
    x, y = data()
    for given in (lambda f: f, lambda f: [f]):
        net.zero_grad()
        features, losses = net(x.double(), y)
        backward(dict(zip("abc", losses, strict=True)), net, SumSGD(), features=given(features))
        found = gradients(net)
        net.zero_grad()
        sum(net(x.double(), y)[1]).backward()
        assert_same(found, gradients(net), atol=1e-12)


def test_features_that_cannot_be_had_are_refused_in_words() -> None:
    net = Trunk()
    features, losses = net(*data())
    with pytest.raises(NestlingError, match="features has no graph"):
        backward(losses, net, OSGD(), features=features.detach())
    with pytest.raises(NestlingError, match="features is a module"):
        backward(losses, net, OSGD(), features=net.body)  # type: ignore[arg-type]
    with pytest.raises(NestlingError, match="no loss depends on features 0"):
        backward(losses, net, OSGD(), features=net(*data())[0])
    with pytest.raises(NestlingError, match="features= is given with mode="):
        backward(losses, net, OSGD(), features=features, mode="rows")
    tied = [loss + net.get_parameter("body.0.weight").sum() for loss in losses]
    with pytest.raises(NestlingError, match=r"body.0.weight is used before the features and after them"):
        backward(tied, net, OSGD(), features=features)


def test_shared_and_task_parameters_said_outright() -> None:
    """Of a net compiled whole, say, whose graph does not tell; here equal to what the graph tells."""
    net = make("two tasks")
    owners = owners_from(
        net.get_submodule("encoder").parameters(),
        [net.get_submodule("classify").parameters(), net.get_submodule("regress").parameters()],
    )
    for combine in (NormSGD(), OSGD(scope="shared")):
        net.zero_grad()
        backward(losses_of(net, *batch()), net, combine, owners=owners)
        found = gradients(net)
        net.zero_grad()
        backward(losses_of(net, *batch()), net, combine)
        assert_same(found, gradients(net))


@pytest.mark.parametrize("mode", ["rows", "layers"])
def test_one_loss_per_sample(mode: str) -> None:
    """A hundred losses: more than an int64 has bits."""
    torch.manual_seed(0)
    net = nn.Linear(130, 1).double()
    x, y = torch.randn(100, 130, dtype=torch.float64), torch.randn(100, dtype=torch.float64)
    losses = list((net(x)[:, 0] - y).pow(2))
    rows = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)])
            for loss in losses
        ]
    )
    report = backward(losses, net, OSGD(), mode=mode)
    found = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    wanted = literal_osgd(rows, list(range(100)), [1.0] * 100)
    torch.testing.assert_close(found, wanted, atol=1e-6 * float(wanted.norm()), rtol=0)
    torch.testing.assert_close(report.whole, rows @ rows.T)
    with pytest.raises(NestlingError, match="at most 62"):
        backward(list((net(x)[:, 0] - y).pow(2)), net, OSGD(), owners=owners_from(net.parameters(), [[]]))


def test_a_report_for_a_log_in_one_line() -> None:
    net = make("two tasks")
    report = backward(losses_of(net, *batch()), net, OSGD())
    found = report.scalars(["class", "angle"])
    assert found["weight/angle"] == 1.0 and found["norm/class"] == pytest.approx(float(report.norms[0]))
    assert found["cosine/angle/class"] == pytest.approx(float(report.cosines[0, 1])) and len(found) == 7
    assert all(isinstance(value, float) for value in found.values())
    plain = nestling.backward(losses_of(net, *batch()), net, SumSGD())  # one backward: there are only weights
    assert plain.scalars() == {"weight/0": 1.0, "weight/1": 1.0}
