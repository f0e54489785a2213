"""Nests a small model of many families of timm with `nest(model, "w,w", uneven=True)` and checks the promises on each.

    python benchmarks/nest_timm.py                     a table, and results/nest-timm.csv; rows that are there are kept
    python benchmarks/nest_timm.py --only convnext     models whose name holds the text; no file is written

Random weights, batch 2, float32, ten classes, images as large as the model asks for. One stage against the module, stages
against the whole, the first answer with NaN in all that is born later, multiply-accumulates as torch counts them. Needs timm;
no weights are fetched.
"""

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import torch
from sweep import without_operators
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from nestling.errors import NestlingError
from nestling.nets.nest import nest
from nestling.nets.net import NestedNet

FILE = Path(__file__).parent.parent / "results" / "nest-timm.csv"
COLUMNS = [
    "model",
    "outcome",
    "reason",
    "macs_w1",
    "macs_w2",
    "macs_w4",
    "macs_unnested",
    "error_one",
    "error_staged",
    "seconds",
]
MODELS = (
    "vit_tiny_patch16_224", "poolformer_s12", "convnext_atto", "pit_ti_224", "swin_tiny_patch4_window7_224",
    "deit_tiny_patch16_224", "convnextv2_atto", "cait_xxs24_224", "levit_128s", "xcit_nano_12_p16_224", "edgenext_xx_small",
    "mobilevit_xxs", "efficientformer_l1", "pvt_v2_b0", "mixer_s32_224", "resmlp_12_224", "gmixer_12_224",
    "inception_next_atto", "starnet_s1", "deit_tiny_distilled_patch16_224", "crossvit_tiny_240", "twins_pcpvt_small",
    "tiny_vit_5m_224", "convmixer_768_32", "gmlp_ti16_224", "poolformerv2_s12", "convformer_s18", "caformer_s18",
    "visformer_tiny",
)  # fmt: skip


def examine(name: str) -> dict[str, Any]:
    import timm

    start, row = time.perf_counter(), dict.fromkeys(COLUMNS, "")
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10).eval()
    shape = tuple(model.default_cfg["input_size"])
    try:
        row |= promises(model, shape)
    except NestlingError as error:
        row |= {"outcome": "refused", "reason": str(error)}
    return row | {"model": name, "seconds": round(time.perf_counter() - start, 1)}


@torch.no_grad()
def promises(model: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
    for parameter in model.parameters():  # some heads start at zero, which would hide everything
        if not parameter.any():
            parameter.normal_(0, 0.02)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    alone = nest(model, "", shape=shape, uneven=True, proof=False).eval()
    one = difference(alone(x)[0], model(x))
    net = nest(model, "w,w", shape=shape, uneven=True, proof=False).eval()
    whole = net(x)
    staged = max(difference(mine, theirs) for mine, theirs in zip(net.answers(x), whole, strict=True))
    check_counts(net, x)
    owners = net.owners()
    for key, parameter in net.named_parameters():
        parameter[(owners[key] & 1 == 0).expand_as(parameter)] = float("nan")
    assert difference(next(iter(net.answers(x))), whole[0]) < 1e-4, "stage 1 depends on later weights"
    assert max(one, staged) < 1e-3, f"they differ: {one}, {staged}"
    macs = {f"macs_w{size}": net.plan.macs(stage) for stage, size in enumerate((1, 2, 4), start=1)}
    return {"outcome": "nested", **macs, "macs_unnested": alone.plan.macs(1), "error_one": one, "error_staged": staged}


def difference(mine: Tensor, theirs: Tensor) -> float:
    assert torch.isfinite(mine).all() and theirs.abs().max() > 0
    return float((mine - theirs).abs().max() / theirs.abs().max())


def check_counts(net: NestedNet, x: Tensor) -> None:
    state: tuple[Tensor, ...] = (x[:1],)
    for number, stage in enumerate(net.stages, start=1):
        with FlopCounterMode(display=False) as counter:
            _, state = stage(state)
        assert counter.get_total_flops() == 2 * net.plan.new_macs(number), f"stage {number} works more than planned"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only models whose name holds this text")
    only = parser.parse_args().only
    without_operators()
    rows: list[dict[str, Any]] = []
    if FILE.exists() and not only:
        with FILE.open(newline="") as file:
            rows = list(csv.DictReader(file))
    done = {row["model"] for row in rows}
    for name in MODELS:
        if only in name and name not in done:
            rows.append(examine(name))
            print({key: value for key, value in rows[-1].items() if value != ""}, flush=True)
            if not only:
                with FILE.open("w", newline="") as file:
                    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)


if __name__ == "__main__":
    main()
