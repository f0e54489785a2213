"""A user's script that uses every public name, for `mypy --strict` (tests/test_typed.py): never run."""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import torch
from torch import Tensor, nn

import nestling
from nestling import (
    COMBINERS,
    OSGD,
    SGD,
    Accumulator,
    Answer,
    Chooser,
    Damped,
    DataRecipe,
    Greedy,
    NestedNet,
    NestlingError,
    NetworkRecipe,
    NormOSGD,
    NormSGD,
    PCGrad,
    Recipe,
    RunDir,
    Runtime,
    Server,
    Spec,
    StrategyRecipe,
    SumSGD,
    TrainRecipe,
    backward,
    calibrate,
    exits,
    export_net,
    fit,
    from_deadlines,
    keep,
    load,
    nest,
    override,
    resolve,
    trainable,
)


def open_a_network(path: Path) -> NestedNet:
    assert_type(nestling.__version__, str)
    run = resolve("width-resnet42-cifar10")
    assert_type(run.recipe, Recipe)
    assert_type(run.results, dict[str, Any])
    assert_type(run.net("cpu"), NestedNet)
    assert_type(run.images(8), Tensor)
    assert_type(RunDir.open(path), RunDir)
    assert_type(RunDir.open(path).read_log(), list[dict[str, Any]])
    return load(path, device="cpu")


def make_a_network(backbone: nn.Module) -> tuple[NestedNet, NestedNet, NestedNet]:
    kept = keep(backbone, stripes=(1 / 8, 1 / 4), budget=0.3)
    assert_type(kept.overhead, float)
    torch.optim.SGD(kept.new_parameters(), 0.1)
    calibrate(kept, [torch.randn(8, 3, 32, 32)])
    return nest(backbone, "w,w", shape=(3, 32, 32)), exits(backbone, at=(0.25, 0.5)), kept


def fit_a_network(net: NestedNet, images: Tensor, labels: Tensor, teacher: nn.Module) -> list[float]:
    run = fit(net, (images, labels), (images, labels), teacher=teacher, epochs=3, strategy="sgd")
    return [row["error"] for row in run.results["stages"]]


def search(recipe: Recipe) -> None:
    assert_type(trainable(recipe, set=("train.epochs=3",))({"train.lr": 0.1}), None)


def ask_a_network(net: NestedNet, x: Tensor) -> int:
    assert_type(net(x), tuple[Tensor, ...])
    assert_type(net.answers(x), Iterator[Tensor])
    assert_type(net.subnet(1)(x), Tensor)
    assert_type(net.sizes, tuple[str, ...])
    return net.plan.macs(stage=1)


def describe_a_run() -> Recipe:
    recipe = Recipe(
        "mine",
        data=DataRecipe(name="digits"),
        network=NetworkRecipe(name="width-digits"),
        strategy=StrategyRecipe(name="osgd", order=(1, 2, 3)),
        train=TrainRecipe(epochs=3),
    )
    return override(recipe, ["train.lr=0.05"])


def train(net: NestedNet, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = [nn.functional.cross_entropy(logits, y) for logits in net(x)]
    priority = from_deadlines([0.002, 0.005], latencies=[0.001, 0.003, 0.007])
    report = backward(losses, net, OSGD(order=priority.order, importance=priority.importance))
    assert_type(report.weights, Tensor | None)
    assert_type(report.cosines, Tensor)
    for combine in (SGD(), SumSGD(), NormSGD(), NormOSGD(), PCGrad(seed=0), Damped(0.5), COMBINERS["osgd"]()):
        backward(losses, net.parameters(), combine)
    parts = Accumulator(net, SGD())
    parts.add(losses)
    parts.fill()
    greedy = Greedy(net, optimizer, epochs=30)
    greedy.backward(losses)
    return report.norms.tolist()


async def answer_by_a_deadline(net: NestedNet, folder: Path) -> list[str]:
    image, batch = np.zeros((3, 32, 32), np.uint8), torch.zeros(4, 3, 32, 32)
    spec = Spec("mine", (3, 32, 32), ("cat", "dog"), ("w1", "w2"), mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    try:
        with Chooser([net], device="cpu", spec=spec) as chooser:
            assert_type(chooser.answer(torch.zeros(spec.shape), deadline=0.005), Answer)
        with Runtime(net, device="cpu", spec=spec) as runtime:
            answer = runtime.answer(image, deadline=0.005)
            assert_type(answer, Answer)
            assert_type(answer.refine(deadline=0.01), Answer)
            assert_type(runtime.answers(image, confident=0.9), Generator[Answer, None, None])
            assert_type(runtime.answer_batch(batch, deadline=[0.002, 0.01, None, None]), list[Answer])
            assert_type(runtime.answers_batch(batch), Generator[list[Answer], None, None])
            assert_type(runtime.each(batch, deadline=0.01), Generator[tuple[int, Answer], None, None])
            assert_type(runtime.ask(image, deadline=0.01).best(), Answer)
            assert_type(await runtime.answer_async(image, deadline=0.005), Answer)
            assert_type(runtime.stop_when_sure(0.005).thresholds, tuple[float, ...])
            assert_type(answer.stage, int)
            assert_type(answer.confidence, float)
        with Server("runs/mine", named={"net": net}, device="cpu") as server:
            assert_type(server.answer(image, deadline=0.02, model="net"), Answer)
            assert_type(server.answers(image, model="net"), Generator[Answer, None, None])
            assert_type(await server.answer_async(image, deadline=0.02, model="net"), Answer)
    except NestlingError as error:
        return [str(error)]
    manifest = export_net(net, spec, folder, batch)
    return [stage.file for stage in manifest.stages]
