"""The GPU's kernels: interpreted here, compiled for real where there is a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import finding
from test_gradients import NETS, assert_same, batch, gradients, losses_of, make

from nestling.gradients import Accumulator, kernels
from nestling.gradients.combiners import COMBINERS, OSGD, PCGrad

HERE = Path(__file__).parent


@pytest.mark.slow
def test_kernels_agree_with_the_plain_versions_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, str(HERE / "interpreted_kernels.py")],
        capture_output=True,
        text=True,
        timeout=240,
        env=finding(HERE, TRITON_INTERPRET="1"),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "comparisons held" in ran.stdout


@pytest.fixture(params=[False, True], ids=["plain", "kernels"])
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both versions, whether or not the kernels are asked for outside."""
    monkeypatch.setattr(kernels, "WANTED", request.param)


@pytest.mark.cuda
@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("name", sorted(NETS))
@pytest.mark.parametrize("scope", ["all", "shared", "block", "tensor"])
def test_gpu_and_cpu_agree(name: str, scope: str) -> None:
    for method in sorted(COMBINERS):
        found = []
        for device in ("cpu", "cuda"):
            net = make(name).double().to(device)
            combine = PCGrad(shuffle=False) if method == "pcgrad" else COMBINERS[method]()
            combine.scope = scope if method not in ("normsgd", "sgd", "sgd-sum") else combine.scope
            x, y = batch()
            Accumulator(net, combine, diagnose=True).backward(losses_of(net, x.double().to(device), y.to(device)))
            found.append({n: None if g is None else g.cpu() for n, g in gradients(net).items()})
        assert_same(found[1], found[0], atol=1e-10)


@pytest.mark.cuda
@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("name", sorted(NETS))
def test_a_step_is_captured_in_a_cuda_graph(name: str) -> None:
    net = make(name).cuda()
    rows = Accumulator(net, OSGD())
    x, y = (t.cuda() for t in batch())
    other, other_y = (t.cuda() for t in batch(seed=5))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            net.zero_grad()
            rows.backward(losses_of(net, x, y))
    torch.cuda.synchronize()
    net.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows.backward(losses_of(net, x, y))
    x.copy_(other)
    y.copy_(other_y)
    graph.replay()
    torch.cuda.synchronize()
    found = gradients(net)
    net.zero_grad()
    rows.backward(losses_of(net, other, other_y))
    assert_same(found, gradients(net), atol=1e-6)
