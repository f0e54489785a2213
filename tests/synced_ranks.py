"""What each rank does in test_ranks_equal.py: `torchrun --nproc-per-node 2 synced_ranks.py FOLDER`.

Every rank normalises its half of a batch by the statistics of both, and holds that against the whole batch in torch's own norms.
"""

import copy
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.nets import NestedNet, build
from nestling.nets.synced import batch_norm, synchronise
from nestling.recipes import named
from nestling.recipes.recipe import override
from nestling.runs.folder import RunDir

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from ranks import SMALL, InFloat64

PLAIN: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.BatchNorm1d(3), (8, 3)),
    (nn.BatchNorm1d(3), (8, 3, 5)),
    (nn.BatchNorm2d(3, momentum=None), (8, 3, 4, 4)),
    (nn.BatchNorm2d(3, affine=False), (8, 3, 4, 4)),
    (nn.BatchNorm2d(3, track_running_stats=False), (8, 3, 4, 4)),
    (nn.BatchNorm3d(3), (8, 3, 2, 2, 2)),
]


def close(found: Tensor, wanted: Tensor, what: object) -> None:
    apart = float((found - wanted).detach().abs().max())
    assert apart <= 1e-12, (what, apart)


def same_gradients(net: nn.Module, reference: nn.Module) -> None:
    """This rank's part of a mean over ranks: their mean is the reference's gradient; and statistics are the reference's."""
    for (name, p), q in zip(net.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            dist.all_reduce(p.grad)
            close(p.grad / dist.get_world_size(), q.grad, name)
    for (name, found), wanted in zip(net.named_buffers(), reference.buffers(), strict=True):
        close(found.double(), wanted.double(), name)


def norms(rank: int) -> None:
    """torch's own norms, in a module of somebody's."""
    for norm, shape in PLAIN:
        reference = nn.Sequential(copy.deepcopy(norm)).double()
        net = copy.deepcopy(reference)
        synchronise(net)
        for step in range(3):
            whole = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(step)) + 100
            whole.requires_grad_()
            mine = whole.detach()[rank::2].requires_grad_()
            out, wanted = net(mine), reference(whole)
            close(out, wanted[rank::2], norm)
            out.pow(3).mean().backward()
            wanted.pow(3).mean().backward()
            assert mine.grad is not None and whole.grad is not None
            close(mine.grad / 2, whole.grad[rank::2], norm)
        same_gradients(net, reference)
        if norm.track_running_stats:  # else evaluation has this process's batch alone, with one process as with many
            close(net.eval()(mine), reference.eval()(whole)[rank::2], norm)


def nests(rank: int) -> None:
    """Whole, and stage by stage."""
    for recipe in ("digits-width", "digits-depth", "digits-alternate"):
        seed = torch.Generator().manual_seed(0)
        reference = build(named(recipe).network, classes=10, shape=(1, 8, 8), generator=seed).double()
        assert isinstance(reference, NestedNet)
        for staged in (False, True):
            net = copy.deepcopy(reference)
            synchronise(net)
            whole = torch.randn(12, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            alone = copy.deepcopy(reference)
            both = [(net, whole[rank::2]), (alone, whole)]
            outs = [list(each.answers(x)) if staged else list(each(x)) for each, x in both]
            for out, wanted in zip(*outs, strict=True):
                close(out, wanted[rank::2], (recipe, staged))
            for answers in outs:
                sum(out.pow(2).mean() for out in answers).backward()  # type: ignore[union-attr]
            same_gradients(net, alone)


def half_precision(rank: int) -> None:
    """Statistics of bfloat16 images are not of bfloat16."""
    x = (torch.randn(64, 3, 4, 4, generator=torch.Generator().manual_seed(0)) + 30).bfloat16()
    mean, var = torch.zeros(3), torch.ones(3)
    out = batch_norm(x[rank::2], mean, var, None, None, True, 1.0, 1e-5, synced=True)
    assert out.dtype == torch.bfloat16 and mean.dtype == torch.float32
    torch.testing.assert_close(mean, x.float().mean((0, 2, 3)), atol=1e-4, rtol=0)


class Own(nn.BatchNorm2d):
    """A norm that may do anything."""


def refused(rank: int) -> None:
    synchronise(nn.Sequential(Own(3).eval()))  # it sees no batch
    try:
        synchronise(nn.Sequential(Own(3)))
    except NestlingError as error:
        assert "a Own, cannot be synchronised" in str(error)
    else:
        raise AssertionError("a norm of somebody's own was taken")


def begun(path: Path, until: float = math.inf) -> InFloat64:
    """A training of two epochs, on however many ranks this is one of."""
    recipe = override(named("digits-width"), [*SMALL, "train.sync_norms=true", "train.epochs=2"])
    training = InFloat64(recipe, RunDir(path), until=until)
    if training.main and not path.exists():
        RunDir.create(path).write_recipe(recipe)
    return training


def halfway(folder: Path) -> None:
    """An epoch of two, and a checkpoint."""
    for _ in begun(folder / "run", until=0.0).epochs():
        pass


CASES = {case.__name__: case for case in (norms, nests, half_precision, refused)}


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name, case in CASES.items():
        case(dist.get_rank())
        Path(folder, f"{name}-{dist.get_rank()}").touch()
    halfway(Path(folder))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that tears them down: see nestling.__main__


if __name__ == "__main__":
    main(sys.argv[1])
