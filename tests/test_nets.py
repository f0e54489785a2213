"""The four promises of nesting, over the whole registry and over random growth orders: staged and whole runs agree,
stopping is exact, nothing leaks from later stages into earlier ones, and nothing is computed twice."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nestling.nets import NETS, NestedNet, build, plan
from nestling.nets.within import positions, within
from nestling.recipes.recipe import NetworkRecipe

LARGE = ("width-resnet50", "depth-sparse66")  # 224x224 and millions of weights: run at a reduced size
SMALLER: dict[str, dict[str, Any]] = {
    "width-resnet50": {"widths": (16, 32, 64, 128), "blocks": (1, 1, 1, 1)},
    "depth-sparse66": {"widths": (8, 8, 16, 16), "blocks": (4, 4, 4, 4)},
    "width-resnet18": {"widths": (8, 16, 32), "blocks": (1, 1, 1)},
    "width-resnet42": {"blocks": (2, 2, 2), "widths": (8, 16, 32)},
    "even-resnet42": {"blocks": (2, 2, 2), "widths": (8, 16, 32)},
    "depth-sparse98": {"widths": (4, 8, 8), "blocks": (8, 8, 8)},
    "alternate-sparse98": {"widths": (4, 8, 16), "blocks": (4, 8, 4)},
    "together-sparse98": {"widths": (4, 8, 16), "blocks": (4, 8, 4)},
    "cascade-sparse98": {"widths": (4, 4, 8)},
    "msdnet": {"widths": (4, 8, 16)},
}


def small_net(name: str, **changes: Any) -> tuple[NestedNet, Tensor]:
    """A registry network, large ones made smaller, in float64, with norms and statistics that are not at their defaults."""
    recipe = NetworkRecipe(name=name, **{**SMALLER.get(name, {}), **changes})
    shape = (3, 64, 64) if name in LARGE else None
    net = build(recipe, classes=10, shape=shape).double()
    return net, stir(net)


def stir(net: NestedNet, batch: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            for tensor in (module.weight.data, module.running_var):
                tensor.uniform_(0.5, 1.5, generator=generator)  # type: ignore[union-attr]
            for tensor in (module.bias.data, module.running_mean):
                tensor.normal_(0, 0.3, generator=generator)  # type: ignore[union-attr]
    shape = (batch, net.plan.input.channels, *net.plan.input.size)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def staged(net: NestedNet, x: Tensor) -> list[Tensor]:
    return list(net.answers(x))


@pytest.fixture(params=sorted(NETS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["f64", "f32"])
def test_staged_and_whole_agree(name: str, training: bool, dtype: torch.dtype, tolerance: float) -> None:
    net, x = small_net(name)
    check_agreement(net.to(dtype), x.to(dtype), training, tolerance)


def check_agreement(net: NestedNet, x: Tensor, training: bool, tolerance: float) -> None:
    net.train(training)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for whole, stage in zip(net(x), staged(twin, x), strict=True):
            scale = whole.abs().max().clamp(min=1)
            assert (whole - stage).abs().max() <= tolerance * scale
    for (key, mine), theirs in zip(net.state_dict().items(), twin.state_dict().values(), strict=True):
        if "num_batches" not in key:
            assert torch.allclose(mine, theirs, rtol=tolerance * 10, atol=tolerance), f"{key} differs after a step"


@settings(max_examples=25, deadline=None)
@given(order=st.lists(st.sampled_from(["w", "d", "wd", "dw"]), max_size=4), even=st.booleans(), training=st.booleans())
def test_staged_and_whole_agree_for_any_growth_order(order: list[str], even: bool, training: bool) -> None:
    widths = 1 + sum("w" in step for step in order)
    stripes = (1,) * widths if even else ()
    units = widths if even else 2 ** (widths - 1)
    recipe = (
        NetworkRecipe(
            name="alternate-digits", growth=",".join(order), stripes=stripes, widths=(units, 2 * units), blocks=(16, 16)
        )
        if order
        else NetworkRecipe(name="alternate-digits", alone=1)
    )
    net = build(recipe).double()
    check_agreement(net, stir(net), training, 1e-12)
    check_nothing_leaks(net, stir(net))


def test_stopping_is_exact(name: str) -> None:
    net, x = small_net(name)
    net.eval()
    with torch.no_grad():
        full = staged(net, x)
        for stop in range(1, len(full) + 1):
            for stage, answer in zip(range(stop), net.answers(x), strict=False):
                assert torch.equal(answer, full[stage])


def test_nothing_leaks_from_later_stages(name: str) -> None:
    net, x = small_net(name)
    check_nothing_leaks(net, x)


def check_nothing_leaks(net: NestedNet, x: Tensor) -> None:
    """Change every entry that task s does not own: its answer stays bitwise the same, in both ways of running."""
    net.eval()
    owners = net.owners()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        whole, stages = net(x), staged(net, x)
        for task in range(len(whole)):
            other = copy.deepcopy(net)
            for key, parameter in other.named_parameters():
                foreign = (owners[key] >> task & 1 == 0).expand_as(parameter)
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.data = torch.where(foreign, noise, parameter.data)
            assert torch.equal(other(x)[task], whole[task])
            assert torch.equal(staged(other, x)[task], stages[task])


def test_gradients_are_zero_exactly_where_a_task_owns_nothing(name: str) -> None:
    net, x = small_net(name)
    owners = net.owners()
    keys, parameters = zip(*net.named_parameters(), strict=True)
    for task, logits in enumerate(net(x)):
        loss = torch.nn.functional.cross_entropy(logits, torch.arange(len(x)))
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        touched = 0
        for key, parameter, grad in zip(keys, parameters, grads, strict=True):
            owned = (owners[key] >> task & 1 == 1).expand_as(parameter)
            if grad is not None:
                assert not grad[~owned].any(), f"task {task} touches foreign entries of {key}"
                touched += int((grad != 0).sum())
            else:
                assert not owned.any(), f"task {task} owns {key} but its loss does not reach it"
        assert touched > 0.5 * net.plan.task_params(task)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_masked_entries_never_move(optimizer: type[torch.optim.Optimizer]) -> None:
    net, x = small_net("alternate-digits")
    momentum: dict[str, Any] = {"momentum": 0.9} if optimizer in (torch.optim.SGD, torch.optim.RMSprop) else {}
    steps = optimizer(net.parameters(), lr=0.05, weight_decay=0.01, **momentum)  # type: ignore[call-arg, unused-ignore]
    masked = {key: owners == 0 for key, owners in net.owners().items()}
    assert sum(int(mask.sum()) for mask in masked.values()) > 1000
    for _ in range(3):
        steps.zero_grad()
        sum(torch.nn.functional.cross_entropy(y, torch.arange(len(x))) for y in net(x)).backward()  # type: ignore[union-attr]
        steps.step()
    for key, parameter in net.named_parameters():
        assert not parameter[masked[key].expand_as(parameter)].any()


def test_nothing_is_done_twice(name: str) -> None:
    """Torch's own counter (2 per multiply-accumulate) sees exactly the planned work in every stage."""
    net, x = small_net(name)
    net.eval()
    state: tuple[Tensor, ...] = (x[:1],)
    with torch.no_grad():
        for number, stage in enumerate(net.stages, start=1):
            with FlopCounterMode(display=False) as counter:
                _, state = stage(state)
            assert counter.get_total_flops() == 2 * net.plan.new_macs(number)


def test_planned_counts_are_the_networks_counts(name: str) -> None:
    recipe = NetworkRecipe(name=name)
    with torch.device("meta"):
        net = NestedNet(plan(recipe))
    dense, _ = net.plan.dense()
    assert sum(p.numel() for p in net.parameters()) == dense
    small, _ = small_net(name)
    assert owned_entries(small) == small.plan.params(small.plan.stages)


def owned_entries(net: NestedNet) -> int:
    owners = net.owners()
    return sum(int((owners[key].expand_as(p) != 0).sum()) for key, p in net.named_parameters())


def test_subnet_equals_its_stage(name: str) -> None:
    net, x = small_net(name)
    net.eval()
    with torch.no_grad():
        for number, answer in enumerate(net(x), start=1):
            alone = net.subnet(number)
            assert torch.allclose(alone(x), answer, rtol=1e-12, atol=1e-12)
            task = number - 1
            assert owned_entries(alone.net) == net.plan.task_params(task), (
                "a subnet holds its own weights and nothing else"
            )


def test_independent_nets_have_the_oracles_sizes() -> None:
    for name, stage, macs in [("width-resnet42", 1, 24.4), ("width-resnet42", 3, 387.8), ("depth-sparse98", 1, 26.4)]:
        alone = plan(NetworkRecipe(name=name, alone=stage))
        assert alone.macs(1) / 1e6 == pytest.approx(macs, rel=0.05)
        assert len(alone.heads) == 1
    nest = plan(NetworkRecipe(name="depth-sparse98"))
    for stage in range(1, 5):  # in depth nothing is masked, so the independent net is D_s to the last parameter
        assert plan(NetworkRecipe(name="depth-sparse98", alone=stage)).params(1) == nest.task_params(stage - 1)


def test_an_ensemble_is_its_members(name: str) -> None:
    net, x = small_net(name, ensemble=True)
    net.eval()
    with torch.no_grad():
        answers = net(x)
        for number in range(1, len(answers) + 1):
            member, _ = small_net(name, alone=number)
            prefix = f"net{number}."
            member.load_state_dict(
                {k.removeprefix(prefix): v for k, v in net.state_dict().items() if k.startswith(prefix)}
            )
            assert torch.allclose(member.eval()(x)[0], answers[number - 1], atol=1e-12)


def test_saving_and_loading_needs_no_pickle(tmp_path, name: str) -> None:  # type: ignore[no-untyped-def]
    net, x = small_net(name)
    save_file(net.state_dict(), tmp_path / "weights.safetensors")
    twin, _ = small_net(name)
    twin.reset(torch.Generator().manual_seed(7))
    twin.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(net.eval()(x), twin.eval()(x), strict=True))


def test_same_seed_same_network() -> None:
    first, second = (build(NetworkRecipe(), generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_stages_compile() -> None:
    """Each stage is one compilable graph, state in and out."""
    net, x = small_net("width-digits")
    net.float().eval()
    with torch.no_grad():
        expected = staged(net, x.float())
        state: tuple[Tensor, ...] = (x.float(),)
        for stage, answer in zip(net.stages, expected, strict=True):
            logits, state = torch.compile(stage, backend="aot_eager", fullgraph=True)(state)
            assert torch.allclose(logits, answer, atol=1e-6)


def test_every_stage_lives_within_the_network(name: str) -> None:
    """D_s over D_n's own memory: same answers, same batch statistics, gradients of just what it owns; updates are seen."""
    net, x = small_net(name)
    y = torch.arange(len(x))
    stages = [within(net.train(), s) for s in range(1, len(net.plan.heads) + 1)]
    twin = copy.deepcopy(net)
    keys, parameters = zip(*twin.named_parameters(), strict=True)
    for number, (small, whole) in enumerate(zip(stages, twin(x), strict=True), start=1):
        loss = torch.nn.functional.cross_entropy(whole, y)
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        flat = torch.cat(
            [(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in zip(parameters, grads, strict=True)]
        )
        (answer,) = small(x)
        assert torch.allclose(answer, whole, rtol=1e-12, atol=1e-12)
        mine = torch.autograd.grad(torch.nn.functional.cross_entropy(answer, y), list(small.parameters()))
        named = dict(zip([key for key, _ in small.named_parameters()], mine, strict=True))
        ordered = torch.cat([named[key].reshape(-1) for key in keys if key in named])
        spread = torch.zeros_like(flat).index_copy_(0, positions(net, number), ordered)
        assert torch.allclose(spread, flat, rtol=1e-9, atol=1e-12)
    for here, there in zip(net.buffers(), twin.buffers(), strict=True):
        assert torch.allclose(here, there), "only the last stage keeps count of the statistics"
    with torch.no_grad():
        next(net.parameters()).mul_(1.5)
        net.eval()
        for number, small in enumerate(stages):
            assert torch.allclose(small.eval()(x)[0], net(x)[number], rtol=1e-12, atol=1e-12)


def test_msdnet_is_its_authors() -> None:
    """Parameters and MACs of their code with 7 exits, base 4, step 2 and 16 channels: 2,986,690 and 75,407,104 (with the same
    weights it gives the same logits, bit for bit). At the first exit theirs has 14,955,776: ours waits with the rest."""
    found = plan(NetworkRecipe("msdnet"))
    assert found.sizes == ("d4", "d6", "d8", "d10", "d12", "d14", "d16")
    assert (found.params(7), found.macs(7), found.macs(1)) == (2_986_690, 75_407_104, 13_244_672)
    cut = plan(NetworkRecipe("msdnet", alone=3))
    assert cut.sizes == ("d8",) and cut.macs(1) < found.macs(3), "no exits before its own"
    # by hand: 3x3 from 3 to 16 channels at 32x32, to 32 at 16x16, to 64 at 8x8
    stem = sum(node.channels * reads * 9 * side**2 for node, reads, side in zip(
        (found.by_name[f"stem{scale}.conv"] for scale in range(3)), (3, 16, 32), (32, 16, 8), strict=True,
    ))  # fmt: skip
    assert stem == 442_368 + 1_179_648 + 1_179_648
