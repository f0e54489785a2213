"""OpenVINO as an engine: the network's answers up to bf16, at once or stage by stage, for one image and for several."""

import numpy as np
import pytest
import torch
from test_export import network
from torch import nn

import nestling
from nestling.errors import NestlingError
from nestling.export.fold import fold, merge
from nestling.export.freeze import freeze, shapes
from nestling.export.graph import write_stage
from nestling.runtime import Abandoned, Stop
from nestling.runtime.build import build_engine
from nestling.runtime.engines.onnx import StageGraph
from nestling.runtime.verified import run_all

pytest.importorskip("openvino")
from nestling.runtime.engines.openvino import OpenVinoEngine

OFF = 0.03  # of logits, relative to the largest: bf16 has 8 bits


@pytest.mark.parametrize("name", ["width-digits", "depth-digits", "alternate-digits", "cascade-digits"])
def test_answers_are_the_network_s_up_to_rounding(name: str) -> None:
    net, x = network(name)
    engine = build_engine(net, "cpu", "openvino")
    with torch.no_grad():
        expected = [logits.numpy() for logits in net(x)]
    for batch in (x.numpy(), x.numpy()[:1]):
        for first in range(1, engine.stages + 1):
            state = engine.start(batch)
            for stage in range(first, engine.stages + 1):
                logits, state = engine.step(stage, state, Stop())
                wanted = expected[stage - 1][: len(batch)]
                assert np.abs(logits - wanted).max() <= OFF * max(1, np.abs(wanted).max())
    engine.close()


def test_images_are_taken_apart_put_together_and_given_up() -> None:
    net, x = network("width-digits")
    engine = build_engine(net, "cpu", "openvino")
    _, state = engine.step(1, engine.start(x.numpy()), Stop())
    all_of_them, _ = engine.step(2, state, Stop())
    some, _ = engine.step(2, engine.take(state, [2]), Stop())
    both, _ = engine.step(2, engine.join([(state, 2), (state, 0)]), Stop())  # type: ignore[attr-defined]
    np.testing.assert_allclose(some, all_of_them[[2]], atol=0.05)
    np.testing.assert_allclose(both, all_of_them[[2, 0]], atol=0.05)
    stop = Stop()
    stop.set()
    with pytest.raises(Abandoned):
        engine.step(2, state, stop)


def test_a_trained_network_errs_as_often_as_in_float32() -> None:
    run = nestling.resolve("width-resnet42-cifar10")
    net, (x, y) = run.net(), next(iter(run.data(sample=True).test.batches(100)))
    stages = merge(fold(freeze(net)))
    known = shapes(net, stages)
    engine = OpenVinoEngine(
        [StageGraph(write_stage(stage, known), stage.takes, stage.gives) for stage in stages], known
    )
    with torch.no_grad():
        expected = net(x)
    for logits, wanted in zip(run_all(engine, x.numpy(), 50), expected, strict=True):
        wrong, before = ((each.argmax(1) != y.numpy()).sum() for each in (logits, wanted.numpy()))
        assert abs(int(wrong) - int(before)) <= 2


def test_it_runs_on_cpus_only() -> None:
    net, _ = network("width-digits")
    with pytest.raises(NestlingError, match="runs on the CPU"):
        build_engine(net, "cuda", "openvino")


def test_what_it_has_no_operator_for_is_refused_in_words() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    net = nestling.exits(module.eval(), at=["0"], shape=(3, 8, 8)).eval()
    with pytest.raises(NestlingError, match=r"^OpenVINO .* cannot run stage 1 .*use the engine 'onnx'$"):
        nestling.Runtime(net, device="cpu", engine="openvino")
