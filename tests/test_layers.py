"""Nested layers by themselves: masks, rows of one stage, norms without parameters, and masking all weights at once."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from nestling.errors import NestlingError
from nestling.nets import NestedNet, build
from nestling.nets.layers import (
    Cut,
    NestedConv2d,
    NestedGroupNorm,
    NestedLinear,
    connections,
)
from nestling.nets.ops import BatchNorm, GroupNorm, Operation, PReLU
from nestling.nets.plan import Node
from nestling.recipes.recipe import NetworkRecipe

BIRTHS = (1, 1, 2, 2)


def test_connections_go_from_earlier_to_later() -> None:
    assert connections((1, 2), (1, 2, 2)).tolist() == [[True, False], [True, True], [True, True]]
    assert connections((1, 2, 1, 2), (1, 2), groups=2).tolist() == [[True, False], [True, True]]


def test_a_layer_without_dropped_connections_has_no_mask() -> None:
    assert NestedConv2d((1, 1), (1, 2), 3).mask is None
    assert NestedConv2d((1, 2), (2, 2), 3).mask is None
    assert NestedLinear((1, 2), (1, 2)).mask is not None


def test_every_row_starts_with_its_own_fan_in() -> None:
    layer = NestedConv2d((1,) * 100 + (2,) * 300, (1,) * 200 + (2,) * 200, 1)
    early, late = layer.weight.data[:200, :100], layer.weight.data[200:]
    assert float(early.std() ** 2) == pytest.approx(2 / 100, rel=0.05)
    assert float(late.std() ** 2) == pytest.approx(2 / 400, rel=0.05)
    assert not layer.weight[:200, 100:].any()


@pytest.mark.parametrize(
    "op",
    [BatchNorm(), BatchNorm(affine=False), GroupNorm(2), GroupNorm(4, affine=False), PReLU()],
    ids=repr,
)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_rows_are_the_rows_of_the_whole(op: Operation, training: bool) -> None:
    node = Node("norm", op, ("x",), BIRTHS, (5, 5))
    layer = op.layer(node, ())
    assert layer is not None
    layer = layer.double().train(training)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    twin = copy.deepcopy(layer)
    whole = layer(x)
    for rows, narrow in ((slice(0, 2), (0, 1)), (torch.tensor([2, 3]), (2, 3))):
        some = op.narrow(node, narrow, [narrow])
        part = some.staged(twin, Cut(rows, slice(0)), [x[:, rows]], training)
        assert torch.allclose(part, whole[:, rows], rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(layer.buffers(), twin.buffers(), strict=True):
        assert torch.allclose(mine, theirs)


def test_a_group_norm_across_stripes_is_refused() -> None:
    with pytest.raises(NestlingError, match="group 0 of 1 holds channels born at stages"):
        NestedGroupNorm(BIRTHS, 1)


# --- all masks at once --------------------------------------------------------------------------------------------


class Layerwise(NestedNet):
    """The plain way: every layer masks its own weight."""

    def live_weights(self) -> dict[str, Tensor]:
        return {}


def test_masking_all_at_once_is_masking_each() -> None:
    net = build(NetworkRecipe(name="alternate-digits")).double()
    plain = Layerwise(net.plan).double()
    assert len(net.live_weights()) > 5
    for parameter in net.parameters():
        parameter.data.add_(0.01)  # masked entries too: forward must not see them, and no gradient may reach them
    plain.load_state_dict(net.state_dict())
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    for task, (ours, reference) in enumerate(zip(net(x), plain(x), strict=True)):
        assert torch.equal(ours, reference)
        found = torch.autograd.grad(ours.square().sum(), list(net.parameters()), retain_graph=True, allow_unused=True)
        wanted = torch.autograd.grad(
            reference.square().sum(), list(plain.parameters()), retain_graph=True, allow_unused=True
        )
        for (key, _), mine, its in zip(net.named_parameters(), found, wanted, strict=True):
            assert (mine is None) == (its is None), f"task {task}: {key}"
            assert mine is None or its is None or torch.equal(mine, its)


def test_gradients_of_each_example() -> None:
    """The whole run works under torch.func too."""
    net = build(NetworkRecipe(name="width-digits")).eval()
    weights: dict[str, Tensor] = dict(net.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(net, parameters, (x[None],))[-1].square().sum()

    x = torch.randn(3, 1, 8, 8)
    each = vmap(grad(loss), in_dims=(None, 0))(weights, x)
    for i in range(3):
        one = grad(loss)(weights, x[i])
        assert all(torch.allclose(each[key][i], one[key], atol=1e-4) for key in weights)


def test_the_whole_run_compiles() -> None:
    net = build(NetworkRecipe(name="width-digits")).eval()
    x = torch.randn(2, 1, 8, 8)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    for mine, reference in zip(compiled(x), net(x), strict=True):
        assert torch.allclose(mine, reference, atol=1e-5)
