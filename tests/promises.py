"""The promises of a nested network, checked on one in float64: staged against whole, stopping, work, leaks, foreign gradients."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from nestling import exits, keep
from nestling.errors import NestlingError
from nestling.nets.nest import nest
from nestling.nets.net import NestedNet

GROWTH = "w,w"
TOLERANCE, DEEP = 1e-12, 1e-10  # staged against whole, float64, relative to the largest logit or 1


def models() -> dict[str, Any]:
    from pytorchcv import model_provider

    return {n: make for n, make in model_provider._models.items() if n.endswith("_cifar10")}


def prepared(make: Any, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A model in float64 with batch norms that have seen a batch, and that batch: 1000 layers then keep their scale."""
    torch.manual_seed(seed)
    module = make(pretrained=False).double().train()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    norms = [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        module(x)
    for norm in norms:
        norm.momentum = 0.1
        if norm.affine:
            norm.weight.data.uniform_(0.5, 1.5)
            norm.bias.data.normal_(0, 0.1)
    return module.eval(), x


def examine(name: str, make: Any) -> dict[str, Any]:
    """One row of the table. A broken promise raises AssertionError; a refusal is an outcome."""
    module, x = prepared(make)
    row: dict[str, Any] = {"model": name, "outcome": "nested", "reason": ""}
    try:
        net = nest(module, GROWTH, name=name)
    except NestlingError as refusal:
        row.update(outcome="nested unevenly", reason=str(refusal).removeprefix(f"{name}: "))
        try:
            net = nest(module, GROWTH, uneven=True, name=name)
        except NestlingError as final:
            return {**row, "outcome": "refused", "reason": str(final).removeprefix(f"{name}: ")}
    with torch.no_grad():
        same = nest(module, "", name=name)(x)[0]
        assert torch.allclose(same, module(x), rtol=1e-12, atol=1e-12), "one stage is the module itself"
        del module
    row.update(counts(net))
    row.update(check_promises(net, x))
    return row


def check_module(make: Callable[[], nn.Module], growth: str, image: tuple[int, ...], uneven: bool = False) -> None:
    """A module of the tests' own, nested in float64: subnetworks, counts and all promises."""
    torch.manual_seed(0)
    module = make().double().eval()
    x = torch.randn(4, *image, dtype=torch.float64)
    net = nest(module, growth, shape=image, uneven=uneven)
    if not growth:
        assert torch.allclose(net(x)[0], module(x), rtol=1e-10, atol=1e-10), "one stage is the module itself"
    with torch.no_grad():
        for number, answer in enumerate(net(x), start=1):
            assert answer.std() > 0
            assert torch.allclose(net.subnet(number)(x), answer, rtol=1e-10, atol=1e-10)
    owners = net.owners()
    planned = net.plan.params(net.plan.stages)
    assert planned == sum(int((owners[k].expand_as(p) != 0).sum()) for k, p in net.named_parameters())
    check_promises(net, x)


def check_ends(make: Callable[[], nn.Module], image: tuple[int, ...]) -> None:
    """Kept, and with exits, it ends where it ended."""
    torch.manual_seed(0)
    module, x = make().eval(), torch.randn(2, *image)
    with torch.no_grad():
        for net in (keep(module, (1 / 4, 1 / 4), image), exits(module, (0.3,), image)):
            assert torch.allclose(net.eval()(x)[-1], module(x), rtol=1e-5, atol=1e-5)


def counts(net: NestedNet) -> dict[str, int]:
    plan, found = net.plan, {"stages": net.plan.stages}
    for stage, size in enumerate(net.sizes, start=1):
        found[f"macs_{size}"], found[f"params_{size}"] = plan.macs(stage), plan.params(stage)
    found["params_unnested"], found["macs_unnested"] = plan.dense()
    return found


def check_promises(net: NestedNet, x: Tensor) -> dict[str, float]:
    """All four promises on one float64 network; returns how far staged and whole runs differ. Leaves it in float32."""
    for module in net.modules():  # dropout draws different numbers in the two ways of running
        if isinstance(module, nn.Dropout | nn.Dropout2d):
            module.p = 0.0
    with torch.no_grad():
        errors = {"error_eval": difference(net.eval()(x), list(net.answers(x)))}
        errors["error_train"] = training_difference(net.train(), x)
        assert max(errors.values()) <= tolerance(net), f"staged and whole differ: {errors}"
        net, x = net.float().eval(), x.float()  # what follows is exact in every precision, and float32 is fast
        whole, stages = net(x), list(net.answers(x))
        errors["error_float32"] = difference(whole, stages)
        check_stopping(net, x, stages)
        check_counts(net, x)
        check_leaks(net, x, whole, stages)
    check_gradients(net, net.train()(x))
    return errors


def tolerance(net: NestedNet) -> float:
    """An untrained network of more than 500 layers amplifies rounding, in training mode, by more than a hundred times."""
    return TOLERANCE if sum(node.op.weighted for node in net.plan.nodes) <= 500 else DEEP


def training_difference(net: NestedNet, x: Tensor) -> float:
    """Whole against staged with batch statistics; the running statistics come out the same too, and are put back."""
    before = {k: v.clone() for k, v in net.state_dict().items() if "running" in k}
    whole = net(x)
    after = {k: v.clone() for k, v in net.state_dict().items() if k in before}
    net.load_state_dict(before, strict=False)
    error = difference(whole, list(net.answers(x)))
    for key, value in net.state_dict().items():
        if key in before:
            bound = 10 * tolerance(net)
            assert torch.allclose(value, after[key], rtol=bound, atol=bound), f"statistics {key} differ"
    net.load_state_dict(before, strict=False)
    return error


def difference(whole: tuple[Tensor, ...], stages: list[Tensor]) -> float:
    for a, b in zip(whole, stages, strict=True):
        assert torch.isfinite(a).all() and torch.isfinite(b).all(), "logits are not finite"
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1)) for a, b in zip(whole, stages, strict=True))


def check_stopping(net: NestedNet, x: Tensor, stages: list[Tensor]) -> None:
    """An answer is bitwise the same when no later stage runs."""
    for stop in range(1, len(stages)):
        for number, answer in zip(range(stop), net.answers(x), strict=False):
            assert torch.equal(answer, stages[number]), "stopping changed an answer"


def check_counts(net: NestedNet, x: Tensor) -> None:
    """Torch's own counter (2 per multiply-accumulate) sees exactly the planned work in every stage."""
    state: tuple[Tensor, ...] = (x[:1],)
    for number, stage in enumerate(net.stages, start=1):
        with FlopCounterMode(display=False) as counter:
            _, state = stage(state)
        assert counter.get_total_flops() == 2 * net.plan.new_macs(number), f"stage {number} works more than planned"


def check_leaks(net: NestedNet, x: Tensor, whole: tuple[Tensor, ...], stages: list[Tensor]) -> None:
    """Noise in every entry that task s does not own leaves its answer bitwise the same, in both ways of running."""
    owners = net.owners()
    kept = {key: parameter.detach().clone() for key, parameter in net.named_parameters()}
    for task in range(len(whole)):
        for key, parameter in net.named_parameters():
            foreign = (owners[key] >> task & 1 == 0).expand_as(parameter)
            parameter.data = torch.where(foreign, torch.randn_like(parameter) * 0.1, kept[key])
        assert torch.equal(net(x)[task], whole[task]), f"stage {task + 1} depends on later weights"
        for number, answer in zip(range(task + 1), net.answers(x), strict=False):
            assert number < task or torch.equal(answer, stages[task]), f"stage {task + 1} depends on later weights"
    for key, parameter in net.named_parameters():
        parameter.data = kept[key]


def check_gradients(net: NestedNet, logits: tuple[Tensor, ...]) -> None:
    """The loss of a stage has a gradient of exactly zero on every entry it does not own."""
    owners = net.owners()
    keys, parameters = zip(*((key, p) for key, p in net.named_parameters() if p.requires_grad), strict=True)
    for task, answer in enumerate(logits):
        loss = F.cross_entropy(answer, torch.arange(len(answer)))
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        for key, parameter, grad in zip(keys, parameters, grads, strict=True):
            if grad is not None:
                foreign = (owners[key] >> task & 1 == 0).expand_as(parameter)
                assert not grad[foreign].any(), f"stage {task + 1} moves entries of {key} it does not own"
