"""How good every stage is: error, loss, calibration, and how later stages repair or break earlier answers.

In: a network and a split, or the logits it gave. Out: plain dicts (results.json) and the logits themselves
(outputs.safetensors), from which reports and deadline studies are made. It trains nothing and measures no time.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.data import DataSet, MemorySplit, Split
from nestling.data.split import Batch
from nestling.errors import NestlingError
from nestling.files import GALLERY, OUTPUTS, RESULTS
from nestling.nets import NestedNet, Plan
from nestling.nets.modes import evaluating
from nestling.recipes.recipe import TrainRecipe
from nestling.runs.folder import RunDir
from nestling.runs.goal import CLASSES, Examined, check_classes, examined_classes, examined_otherwise, goal_of

BINS = 15  # of the expected calibration error
PICTURES = 48  # in the gallery
INPUTS = 64  # kept beside it, where inputs come as the network takes them
PIXELS = 2000 * 32 * 32  # evaluated at once on a GPU


@torch.no_grad()
def examine(net: NestedNet, split: Split, goal: str, train: TrainRecipe) -> Examined:
    """What every stage is worth on a split. On CUDA nothing waits: all is queued."""
    if goal == CLASSES:
        logits, labels = answers(net, split)
        if not (isinstance(split, MemorySplit) and labels.is_cuda):  # whose labels were looked at before
            check_classes(labels, goal, logits.shape[2])
        return examined_classes(logits, labels, train)
    weight = next(net.parameters())
    batch = max(1, min(1000, PIXELS // (16 * prod(net.plan.input.size))))
    with evaluating(net):
        return examined_otherwise(((net(x), y) for x, y in on_chip(split.batches(batch), weight)), goal, train)


def on_chip(batches: Iterator[Batch], weight: Tensor) -> Iterator[Batch]:
    """On a GPU convolutions want channels last, as the weights of trained nets are."""
    for x, y in batches:
        yield (x.contiguous(memory_format=torch.channels_last) if weight.is_cuda and x.dim() == 4 else x), y


@torch.no_grad()
def check_inputs(net: NestedNet, x: Tensor) -> None:
    """Refuse inputs of a number type that the network cannot take (some convert what they get)."""
    kind = next(net.parameters()).dtype
    try:
        with evaluating(net):
            net(x.to(next(net.parameters()).device))
    except RuntimeError as error:
        if x.dtype == kind:
            raise
        raise NestlingError(
            f"the inputs are {x.dtype}, and the network computes in {kind} ({error}); convert them, such as by inputs.float()"
        ) from error


@torch.no_grad()
def answers(net: NestedNet, split: Split, batch: int = 0) -> tuple[Tensor, Tensor]:
    """Logits (stages, N, classes) in float32 and labels (N), both on the split's device. On CUDA nothing waits: all is
    queued. `batch` 0: as many images as are quick, see `quick_batch`."""
    weight = next(net.parameters())
    kept: list[Tensor] = []
    labels: list[Tensor] = []
    with evaluating(net):
        for x, y in on_chip(split.batches(batch or quick_batch(net.plan, weight.device)), weight):
            kept.append(torch.stack(net(x)).float())
            labels.append(y)
    return torch.cat(kept, 1), torch.cat(labels)


def quick_batch(plan: Plan, device: torch.device) -> int:
    """1000 images on a CPU; on a GPU about two million pixels, 2000 images of 32x32: fewer calls, and they fill the chip."""
    return max(1, PIXELS // prod(plan.input.size)) if device.type == "cuda" else 1000


def errors(logits: Tensor, labels: Tensor) -> Tensor:
    """Error of each stage, (stages,), on the device: no synchronisation."""
    return (logits.argmax(2) != labels).float().mean(1)


def calibration(logits: Tensor, labels: Tensor) -> float:
    """Expected calibration error of one stage: |confidence - accuracy| in equal bins, weighted by how many fall in."""
    confidence, answer = logits.double().softmax(1).max(1)
    right = (answer == labels).double()
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    gap = torch.zeros(BINS, dtype=torch.float64, device=logits.device)
    gap.index_add_(0, bins, confidence - right)
    return float(gap.abs().sum() / len(labels))


def top5(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """The share of images whose class is not among the five likeliest; nothing where there are few classes to err in."""
    if logits.shape[1] <= 10:
        return {}
    likeliest = logits.topk(5, dim=1).indices
    return {"top5": float((likeliest != labels[:, None]).all(1).double().mean())}


def judge_otherwise(found: Examined, plan: Plan) -> dict[str, Any]:
    """What results.json says about stages whose answers are no classes of inputs."""
    rows = []
    for index, stage in enumerate(plan.answering):
        said = {"stage": stage, "size": plan.sizes[index], "error": float(found.errors[index])}
        if found.iou is not None:
            said["iou"] = float(found.iou[index])
        rows.append(
            {**said, "loss": float(found.losses[index]), "macs": plan.macs(stage), "params": plan.params(stage)}
        )
    return {"task": found.goal, "stages": rows, "transitions": []}


def judge(logits: Tensor, labels: Tensor, plan: Plan) -> dict[str, Any]:
    """Everything results.json says about the stages."""
    if not bool(torch.isfinite(logits).all()):
        raise NestlingError(
            "an answer to the test data is no finite number, so there is no error to speak of; look for such numbers among the "
            "test inputs"
        )
    wrong = logits.argmax(2) != labels
    stages = []
    for index, stage in enumerate(plan.answering):
        stages.append(
            {
                "stage": stage,
                "size": plan.sizes[index],
                "error": float(wrong[index].double().mean()),
                **top5(logits[index], labels),
                "loss": float(F.cross_entropy(logits[index].double(), labels)),
                "ece": calibration(logits[index], labels),
                "macs": plan.macs(stage),
                "params": plan.params(stage),
            }
        )
    transitions = [
        {
            "from": plan.answering[i],
            "to": plan.answering[i + 1],
            "repaired": float((wrong[i] & ~wrong[i + 1]).double().mean()),
            "broken": float((~wrong[i] & wrong[i + 1]).double().mean()),
        }
        for i in range(len(stages) - 1)
    ]
    return {"stages": stages, "transitions": transitions}


def evaluate(
    net: NestedNet,
    data: DataSet,
    split: str = "test",
    known: Examined | None = None,
    train: TrainRecipe | None = None,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """results.json of a network, and the tensors behind it. `known`: what was just found; `train`: the loss and error that are
    the run's own."""
    train = train or TrainRecipe()
    found = known or examine(net, data.test, goal_of(data.test, train), train)
    classes = found.goal == CLASSES
    judged = (
        judge(found.tensors["logits"], found.tensors["labels"], net.plan)
        if classes
        else judge_otherwise(found, net.plan)
    )
    facts = {
        "network": net.plan.name,
        "data": data.name,
        "split": split,
        "n": next(iter(found.tensors.values())).shape[1],
    }
    return {**facts, **about(data), **judged}, found.tensors


def about(data: DataSet) -> dict[str, Any]:
    """What who answers must know where the data are not."""
    return {
        "classes": list(data.classes),
        "shape": list(data.shape),
        "mean": list(data.mean),
        "std": list(data.std),
        "prior": class_shares(data),
    }


def class_shares(data: DataSet) -> list[float]:
    """How often each class is among the training images; empty where there are none, or where they are numbered otherwise."""
    labels = data.train.labels.cpu()
    if not data.classes or not len(labels) or labels.dim() != 1 or labels.is_floating_point():
        return []
    if int(labels.min()) < 0 or int(labels.max()) >= len(data.classes):
        return []
    counts = torch.bincount(labels, minlength=len(data.classes)).double()
    return [float(share) for share in counts / counts.sum()]


def gallery(logits: Tensor, labels: Tensor, count: int = PICTURES) -> Tensor:
    """Indices of test images worth looking at: equally many from each "first stage that is right and stays right"."""
    right = (logits.argmax(2) == labels).cpu()
    stages = len(right)
    # settled[i] = the first stage from which on every answer is right; `stages` where the last one is wrong
    steady = right.flip(0).cummin(0).values.flip(0)
    settled = stages - steady.sum(0)
    each = -(-count // (stages + 1))
    chosen = [torch.nonzero(settled == stage).flatten()[:each] for stage in range(stages + 1)]
    return torch.cat(chosen)[:count].sort().values


def store(
    run: RunDir,
    net: NestedNet,
    data: DataSet,
    split: str,
    known: Examined | None = None,
    train: TrainRecipe | None = None,
) -> dict[str, Any]:
    """Evaluate and leave results.json, outputs and gallery in the run folder."""
    found, tensors = evaluate(net, data, split, known, train)
    keep(run, data, found, tensors)
    return found


def keep(run: RunDir, data: DataSet, found: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Leave what `evaluate` found in the run folder."""
    run.save_tensors(OUTPUTS, tensors)
    classes = "logits" in tensors
    indices = gallery(tensors["logits"], tensors["labels"]) if classes else torch.arange(min(PICTURES, found["n"]))
    seen = {"images": data.test.pictures(indices)} if len(data.shape) == 3 else {}
    run.save_tensors(GALLERY, {**seen, "indices": indices, **inputs(data)})
    run.write_json(RESULTS, found | taught(run))


def taught(run: RunDir) -> dict[str, Any]:
    """What earlier results say of the network that it learnt from, which is not asked again; {} where they cannot be read."""
    try:
        before = run.read_facts(RESULTS)
    except NestlingError:
        return {}
    return {key: before[key] for key in ("teacher",) if key in before}


def inputs(data: DataSet) -> dict[str, Tensor]:
    """Some test inputs as the network takes them, where its pictures do not tell how."""
    if data.mean:
        return {}
    found: list[Tensor] = []
    for x, _ in data.test.batches(INPUTS):
        found.append(x.cpu())
        if sum(map(len, found)) >= INPUTS:
            break
    return {"inputs": torch.cat(found)[:INPUTS]}
