"""OSGD with FSDP2: blocks and root sharded as ever, one line instead of `sum(losses).backward()`.

`torchrun --nproc-per-node 2 examples/fsdp2.py [steps]`. Every rank holds its share of each task's gradient, and of
those no more than the Gram matrix is exchanged once more.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from two_task import TwoTask, data

import nestling


def main(steps: int = 300) -> None:
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    x, digit, lean = (part.to(device) for part in data())
    net = TwoTask().to(device)
    fully_shard(net.encoder)
    fully_shard(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
    rows = nestling.Accumulator(net, nestling.OSGD(order=["digit", "lean"]))
    for step in range(steps):
        batch = torch.randint(len(x), (128,)).to(device)[rank::ranks]  # one batch, and every rank's part of it
        digits, leans = net(x[batch])
        losses = {"digit": F.cross_entropy(digits, digit[batch]), "lean": F.mse_loss(leans, lean[batch])}
        optimizer.zero_grad()
        report = rows.backward(losses)  # instead of sum(losses.values()).backward()
        optimizer.step()
        if rank == 0 and (step % 100 == 0 or step == steps - 1):
            first, second = (loss.item() for loss in losses.values())
            cosine, kept = report.cosines[0, 1].item(), report.kept[1].item()
            print(f"step {step:3d}  digit {first:.3f}  lean {second:.4f}  cosine {cosine:+.2f}  kept {kept:.2f}")
    dist.barrier()  # nobody leaves while others still send
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
