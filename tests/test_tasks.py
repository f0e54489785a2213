"""Tasks by name, and tasks that are absent from a batch."""

import pytest
import torch
from test_gradients import assert_same, batch, gradients, losses_of, make
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.gradients import Accumulator, backward
from nestling.gradients.combiners import OSGD, SGD, NormSGD, SumSGD
from nestling.gradients.combiners.weighted import Weighted

NAMES = ("depth", "normals", "edges")


def by_name(losses: list[Tensor], names: tuple[str, ...] = NAMES) -> dict[str, Tensor | None]:
    return dict(zip(names, losses, strict=True))


def after(net: nn.Module, act: object) -> dict[str, Tensor | None]:
    net.zero_grad()
    act()  # type: ignore[operator]
    return gradients(net)


def test_priorities_by_name_are_those_by_number() -> None:
    net = make("nested")
    wanted = after(net, lambda: backward(losses_of(net, *batch()), net, OSGD(order=[2, 0, 1])))
    combine = OSGD(order=["edges", "depth", "normals"])
    assert_same(after(net, lambda: backward(by_name(losses_of(net, *batch())), net, combine)), wanted)
    rows = Accumulator(net, combine)
    rows.backward(by_name(losses_of(net, *batch())))

    def turned() -> None:  # the order of the first step holds, whatever order the next mapping has
        losses = by_name(losses_of(net, *batch()))
        rows.backward({name: losses[name] for name in ("normals", "edges", "depth")})

    assert_same(after(net, turned), wanted)
    changing = OSGD(order=lambda epoch: ["depth", "normals", "edges"] if epoch else ["edges", "depth", "normals"])
    assert_same(after(net, lambda: backward(by_name(losses_of(net, *batch())), net, changing)), wanted)


@pytest.mark.parametrize("name", ["nested", "sliced"])  # owners found, and given
@pytest.mark.parametrize("mode", ["rows", "layers"])
@pytest.mark.parametrize("combine", [OSGD(), OSGD(scope="tensor"), SumSGD(), NormSGD()])
def test_an_absent_task_has_no_gradient(combine: Weighted, mode: str, name: str) -> None:
    net = make(name)
    rows = Accumulator(net, combine, mode=mode)
    rows.backward(by_name(losses_of(net, *batch())))
    for gone in range(3):

        def without(gone: int = gone) -> None:
            losses = by_name(losses_of(net, *batch()))
            rows.backward({task: loss for task, loss in losses.items() if task != NAMES[gone]})

        def as_zero(gone: int = gone) -> None:
            losses = losses_of(net, *batch())
            losses[gone] = 0 * losses[gone]
            backward(losses, net, combine)

        if isinstance(combine, NormSGD) and name == "nested":  # the mean is over those that are there
            continue
        found, wanted = after(net, without), after(net, as_zero)
        for key, want in wanted.items():
            have = found[key]
            if have is None:
                assert want is None or not want.any(), key
            else:
                assert want is not None
                torch.testing.assert_close(have, want)


def test_an_absent_task_is_left_out_of_a_mean_over_owners() -> None:
    net = make("nested")
    rest = after(net, lambda: backward(losses_of(net, *batch())[:2], net, NormSGD()))
    absent = after(net, lambda: backward([*losses_of(net, *batch())[:2], None], net, NormSGD()))
    shared = "stages.0.0.weight"
    assert rest[shared] is not None and absent[shared] is not None
    torch.testing.assert_close(absent[shared], rest[shared])


def test_the_last_task_that_is_there_frees_the_graph() -> None:
    net = make("nested")
    losses: list[Tensor | None] = [*losses_of(net, *batch())]
    kept, losses[2] = losses[2], None
    backward(losses, net, OSGD())
    assert losses[0] is not None and losses[0].grad_fn is None
    assert kept is not None
    with pytest.raises(NestlingError, match="already freed"):
        backward([kept], net, OSGD())


def test_sgd_divides_by_the_importance_of_all_tasks() -> None:
    net = make("nested")
    found = after(net, lambda: backward([losses_of(net, *batch())[0], None, None], net, SGD()))
    wanted = after(net, lambda: backward([losses_of(net, *batch())[0] / 3], net, SumSGD()))
    assert_same(found, wanted)


def test_tasks_that_come_later_are_refused_in_words() -> None:
    net = make("nested")
    rows = Accumulator(net, OSGD())
    losses = by_name(losses_of(net, *batch()))
    rows.backward({name: losses[name] for name in NAMES[:2]})
    with pytest.raises(NestlingError, match="a task 'edges' that was not there before"):
        rows.backward(by_name(losses_of(net, *batch())))
