"""Nets compiled whole, and whole steps: ownership comes from a first step that is not compiled, or from the net's plan."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from test_gradients import assert_same, batch, gradients, make
from test_right_or_refused import losses_from
from torch import Tensor, nn

from nestling import NetworkRecipe
from nestling.errors import NestlingError
from nestling.gradients import Accumulator, backward
from nestling.gradients.combiners import OSGD, NormOSGD, NormSGD
from nestling.gradients.combiners.weighted import Weighted
from nestling.nets import build

MATTER: list[Callable[[], Weighted]] = [
    NormSGD,
    NormOSGD,
    lambda: OSGD(scope="shared"),
    lambda: OSGD(scope="block"),
]


@pytest.fixture(autouse=True)
def several_passes() -> Iterator[None]:
    torch._dynamo.reset()
    with functorch.patch(donated_buffer=False):
        yield


def whole(net: nn.Module) -> Any:
    return torch.compile(net, backend="aot_eager")


def wanted_of(net: nn.Module, combine: Weighted, steps: int) -> dict[str, Tensor | None]:
    """What eager steps add up to."""
    x, y = batch()
    rows = Accumulator(net, combine)
    for _ in range(steps):
        rows.backward(losses_from(net(x), y))
    found = gradients(net)
    net.zero_grad()
    return found


def is_compiled(out: Tensor) -> bool:
    return out.grad_fn is not None and out.grad_fn.name() == "CompiledFunctionBackward"


@pytest.mark.parametrize("make_combine", MATTER)
@pytest.mark.parametrize("kind", ["nested", "tree"])
def test_the_first_pass_is_not_compiled_and_tells_who_owns_what(
    kind: str, make_combine: Callable[[], Weighted]
) -> None:
    net = make(kind)
    wanted = wanted_of(net, make_combine(), 3)
    x, y = batch()
    compiled = whole(net)
    rows = Accumulator(compiled, make_combine())
    with torch.no_grad():
        compiled(x)  # looks at nothing: the first pass that trains is what counts
    seen = []
    for _ in range(3):
        outs = compiled(x)
        seen.append(is_compiled(outs[0]))
        report = rows.backward(losses_from(outs, y))
    assert seen == [False, True, True]
    assert_same(gradients(net), wanted)
    assert report.flips is not None  # it is known who owns what


def test_a_net_that_is_compiled_after_some_steps_keeps_what_they_told() -> None:
    net = make("nested")
    wanted = wanted_of(net, NormSGD(), 2)
    x, y = batch()
    rows = Accumulator(net, NormSGD())
    rows.backward(losses_from(net(x), y))
    rows.backward(losses_from(whole(net)(x), y))
    assert_same(gradients(net), wanted)


def test_a_whole_step_compiled() -> None:
    """Forward passes, losses and our own step in one function: torch.compile leaves the latter as it is."""
    net = make("nested")
    x, y = batch()
    for combine in (OSGD(), NormSGD()):
        wanted = wanted_of(net, combine, 3)
        rows = Accumulator(net, combine)

        def step(x: Tensor, y: Tensor, rows: Any = rows) -> None:
            rows.backward(losses_from(net(x), y))

        with torch.compiler.set_stance("force_eager"):
            step(x, y)
        quick = torch.compile(step, backend="aot_eager")
        for _ in range(2):
            quick(x, y)
        assert_same(gradients(net), wanted)
        net.zero_grad()


def test_a_whole_step_that_was_never_eager_is_refused_where_owners_matter() -> None:
    net = make("nested")
    x, y = batch()
    rows = Accumulator(net, NormSGD())
    quick = torch.compile(lambda x, y: rows.backward(losses_from(net(x), y)), backend="aot_eager")
    with pytest.raises(NestlingError, match=r"compiled whole.*Accumulator made before"):
        quick(x, y)
    assert all(grad is None for grad in gradients(net).values())


def test_a_nest_brings_its_plan() -> None:
    net = build(NetworkRecipe(name="depth-digits")).double()
    x, y = torch.randn(6, 1, 8, 8, dtype=torch.float64), torch.randint(10, (6,))
    net.eval()  # running statistics would differ from step to step
    backward(losses_from(list(net(x)), y), net, NormSGD())
    wanted = gradients(net)
    net.zero_grad()
    compiled = whole(net)
    outs = compiled(x)
    assert is_compiled(outs[0])
    backward(losses_from(outs, y), compiled, NormSGD())
    assert_same(gradients(net), wanted)


class Switched(nn.Module):
    """The second task uses one layer more after a switch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.more, self.heads = False, nn.ModuleList(nn.Linear(5, 3) for _ in range(2))
        self.extra = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> list[Tensor]:
        first, second = (head(x) for head in self.heads)
        return [first + self.extra(x), second + self.extra(x) if self.more else second]


def test_what_is_no_longer_so_is_noticed() -> None:
    net, x, y = Switched(), torch.randn(4, 5), torch.randint(3, (4,))
    compiled = whole(net)
    rows = Accumulator(compiled, NormSGD())
    for _ in range(2):
        rows.backward(losses_from(compiled(x), y))
    net.more = True
    before = gradients(net)
    with pytest.raises(NestlingError, match=r"extra.* got a gradient from task 1, which did not"):
        rows.backward(losses_from(compiled(x), y))
    assert_same(gradients(net), before, atol=0)


def test_nothing_is_held_back_where_owners_do_not_matter() -> None:
    net = make("nested")
    x, _ = batch()
    compiled = whole(net)
    Accumulator(compiled, OSGD())
    assert is_compiled(compiled(x)[0])
