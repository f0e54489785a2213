"""Every method in every wrapper on two ranks: `torchrun --nproc-per-node 2 every_ranks.py FOLDER`.

A method is an entry of COMBINERS or RIVALS; a wrapper is the bare model, DistributedDataParallel however it was made, or FSDP2 in
every arrangement of two ranks. Two steps, each rank on its half of the batch, have to equal one process on all of it, to the bit
alike on both ranks; a NaN on one rank is refused on both. What is found amiss goes to FOLDER/RANK.
"""

import gc
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed_ranks import WRAPS, Nest
from sharded_ranks import ARRANGEMENTS, full, mine, refused, same, sharded
from torch import Tensor, nn

from nestling.gradients import Accumulator
from nestling.gradients.combiners import COMBINERS, RIVALS, Watched
from nestling.gradients.combiners.weighted import Weighted

METHODS: dict[str, type[Weighted]] = {**COMBINERS, **RIVALS}


def made(method: str) -> Weighted:
    """With what it cannot do without, and chance that another process has, too."""
    kind: Any = METHODS[method]
    return kind(3) if issubclass(kind, Watched) else kind(seed=0) if method == "pcgrad" else kind()


def wrappers() -> dict[str, Callable[[nn.Module], nn.Module]]:
    found: dict[str, Callable[[nn.Module], nn.Module]] = {"bare": lambda net: net}
    for name, options in WRAPS.items():
        found[name] = partial(nn.parallel.DistributedDataParallel, **options)
    for name, options in ARRANGEMENTS.items():
        if not options.get("hybrid"):  # needs four ranks
            found[f"fsdp, {name}"] = partial(sharded, **options)
    return found


def grads(net: nn.Module) -> dict[str, Tensor | None]:
    shards = any(hasattr(module, "reshard") for module in net.modules())
    return full(net) if shards else {name: p.grad for name, p in net.named_parameters()}


def alike(found: dict[str, Tensor | None], what: object) -> None:
    """To the bit, on all ranks."""
    flat = torch.cat([grad.flatten() for grad in found.values() if grad is not None])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    assert all(torch.equal(other, flat) for other in others), (what, "ranks differ")


def check(method: str, wrapper: str, x: Tensor, y: Tensor) -> None:
    whole, net = Nest(), Nest()
    wrapped = wrappers()[wrapper](net)
    ours, theirs = Accumulator(wrapped, made(method)), Accumulator(whole, made(method), reduce=False)
    for step in range(2):
        ours.backward(wrapped(mine(x[step]), mine(y[step])))
        theirs.backward(whole(x[step], y[step]))
    found = grads(net)
    same(found, {name: p.grad for name, p in whole.named_parameters()}, (method, wrapper))
    alike(found, (method, wrapper))
    losses = wrapped(mine(x[0]), mine(y[0]))
    if dist.get_rank() == 1:
        losses[1] = losses[1] * float("nan")
    refused(lambda: ours.backward(losses), "task")
    now = grads(net)
    same(now, found, (method, wrapper, "after NaN"), atol=0)


def main(folder: str) -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    gc.freeze()  # what is alive so far need not be looked through for wrappers
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 8, 8, generator=g), torch.randint(4, (2, 8), generator=g)
    told = []
    for wrapper in wrappers():
        for method in METHODS:
            try:
                check(method, wrapper, x, y)
            except Exception:
                told.append(f"{method} in {wrapper}: {traceback.format_exc()}")
            dist.barrier()
            if dist.get_rank() == 0:
                print(wrapper, method, flush=True)
    Path(folder, str(dist.get_rank())).write_text("\n".join(told))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that tears them down


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
