"""Stages in eager torch: the engine that works for every network and device, and the reference for the others.

In: frozen stages and a device. State is the values that later stages take, by name; a step makes new ones and changes none.
Stops between two layers when asked.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from math import prod

import torch
from torch import Tensor

from nestling.export.freeze import Frozen
from nestling.export.torchstage import TorchStage
from nestling.runtime.engine import Floats, Stop

NamedTensors = Mapping[str, Tensor]


class Exact:
    """While anybody is inside, cuDNN computes in full float32: TF32, torch's default on GPUs, is off by a thousandth. The
    setting belongs to the process, so several threads must not restore it under each other."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.before = torch.backends.cudnn.allow_tf32
                torch.backends.cudnn.allow_tf32 = False
            self.inside += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                torch.backends.cudnn.allow_tf32 = self.before


EXACT = Exact()


class EagerEngine:
    """Runs frozen stages with torch, layer by layer."""

    name = "torch eager"
    most = 0
    stops = True
    jumps = False
    places = 1

    def __init__(
        self,
        stages: Sequence[Frozen],
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device | str = "cpu",
        threads: int = 0,
    ) -> None:
        """threads=0 leaves torch's own number of threads."""
        self.device, self.threads = torch.device(device), threads
        self.modules = [TorchStage(stage).to(self.device) for stage in stages]
        self.later = [{name for stage in stages[done:] for name in stage.takes} for done in range(len(stages) + 1)]
        passed = {"input"} | {name for stage in stages for name in stage.gives}
        self.row_bytes = sum(4 * prod(shapes[name]) for name in passed)

    @property
    def stages(self) -> int:
        return len(self.modules)

    def start(self, x: Floats) -> NamedTensors:
        return {"input": torch.from_numpy(x).to(self.device)}

    def step(self, stage: int, state: NamedTensors, stop: Stop) -> tuple[Floats, NamedTensors]:
        if self.threads and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)  # a number per thread: the worker's own
        module = self.modules[stage - 1]
        module.between = stop.check
        with torch.inference_mode(), EXACT if self.device.type == "cuda" else nullcontext():
            logits, *given = module(*(state[name] for name in module.frozen.takes))
            found: Floats = logits.cpu().numpy()
        values = {**state, **dict(zip(module.frozen.gives, given, strict=True))}
        return found, {name: value for name, value in values.items() if name in self.later[stage]}

    def take(self, state: NamedTensors, places: Sequence[int]) -> NamedTensors:
        index = torch.tensor(places, device=self.device)
        return {name: value.index_select(0, index) for name, value in state.items()}

    def join(self, parts: Sequence[tuple[NamedTensors, int]]) -> NamedTensors:
        first = parts[0][0]
        return {name: torch.cat([state[name][place : place + 1] for state, place in parts]) for name in first}

    def close(self) -> None:
        self.modules.clear()
