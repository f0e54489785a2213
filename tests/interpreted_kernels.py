"""The GPU's kernels run by Triton's interpreter on a CPU, against the plain versions. Started by test_kernels.py.

`TRITON_INTERPRET=1 python interpreted_kernels.py`; says what failed, or how many comparisons held.
"""

import torch
from test_gradients import Sliced, batch, losses_of, make
from test_strategies import matrix_of
from torch import nn

from nestling.gradients import Accumulator, gpu, kernels
from nestling.gradients.combiners import COMBINERS, OSGD


def pretend() -> None:
    """Let the kernels take on CPU tensors too."""
    kernels.usable = lambda tensor, tasks: tasks <= kernels.MOST and tensor.dtype in kernels.TYPES


def filled(net: nn.Module, method: str, scope: str, twice: bool) -> list[torch.Tensor | None]:
    combine = COMBINERS[method]()
    combine.scope = scope
    net.zero_grad()
    x, y = batch()
    x = x.to(next(net.parameters()).dtype)
    rows = Accumulator(net, combine)
    for _ in range(1 + twice):
        rows.backward(losses_of(net, x, y))
    return [p.grad for p in net.parameters()]


def main() -> None:
    plain = kernels.usable
    done = 0
    cases = [("nested", "all", torch.float32), ("sliced", "all", torch.float64), ("sliced", "block", torch.float32)]
    for name, scope, dtype in [*cases, ("tree", "tensor", torch.float32)]:
        net = make(name).to(dtype)
        if name == "sliced" and dtype == torch.float32:
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        wanted = filled(net, "osgd", scope, twice=scope == "block")
        pretend()
        found = filled(net, "osgd", scope, twice=scope == "block")
        kernels.usable = plain
        for a, b in zip(found, wanted, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                torch.testing.assert_close(a, b, msg=f"{name} {scope} {dtype}")
        done += 1
    for size, shift in ((2500, 0), (2500, 1), (3, 0)):  # aligned, not aligned, tiny
        for tasks in (1, 2, 5):
            g = torch.Generator().manual_seed(size)
            jac = torch.randn(tasks, size + shift, generator=g)[:, shift:]
            p = torch.zeros(size, requires_grad=True)
            taken = Accumulator(p_list := [p], OSGD())
            taken.add([(row * p).sum() for row in jac])
            taken.step.stored = [[row.clone() if not shift else torch.cat([row[:1], row])[1:]] for row in jac]
            pretend()
            report = taken.fill()
            kernels.usable = plain
            gram = jac.double() @ jac.double().T
            assert report.gram is not None and report.weights is not None and p_list[0].grad is not None
            torch.testing.assert_close(report.gram[0], gram)
            torch.testing.assert_close(p.grad, (report.weights[0] @ jac.double()).float())
            done += 1
    for tasks in (1, 3, 5):
        rows = torch.randn(tasks, 2 * kernels.SPAN, generator=torch.Generator().manual_seed(tasks))
        wide, known = rows.double(), torch.arange(1.0, tasks + 1)
        torch.testing.assert_close(kernels.gram_of_matrix(rows).sum(0), wide @ wide.T, rtol=1e-12, atol=1e-12)
        kernels.update_of_matrix(rows, known, out := torch.empty(2 * kernels.SPAN))
        torch.testing.assert_close(out, known @ rows)
        done += 1
    net, (x, y) = Sliced(), batch()
    for scope in ("all", "block", "tensor"):  # rows as a matrix
        plainly = OSGD(scope=scope)(matrix_of(net, x, y))
        wanted = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        pretend()
        report = OSGD(scope=scope)(matrix_of(net, x, y))
        kernels.usable = plain
        assert report.gram is not None and plainly.gram is not None
        torch.testing.assert_close(report.gram, plainly.gram, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close([p.grad for p in net.parameters()], wanted)
        done += 1
    assert gpu.runs(torch.empty(8, 12, 3, 3)[2:6, :7]) == (63, 108)
    assert gpu.runs(torch.empty(4, 6, 5)[:2, :3, :4]) is None
    print(f"{done} comparisons held")


if __name__ == "__main__":
    main()
