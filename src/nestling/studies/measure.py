"""One engine's stages, timed over and over on real inputs. In: an engine and its network. Out: a Latency with the whole trace."""

import time
from collections.abc import Callable

import numpy as np

from nestling.nets import NestedNet
from nestling.runs.latency import WARM_UP, Latency
from nestling.runs.provenance import device_name
from nestling.runtime.engine import Engine, Floats, Stop


def measure(
    engine: Engine,
    net: NestedNet,
    images: Floats,
    repeats: int,
    batch: int = 1,
    threads: int = 1,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> Latency:
    """Run all stages of an engine over and over and time each; a stage's time includes those before it."""
    trace = []
    for repeat in range(WARM_UP + repeats):
        at = repeat * batch % (len(images) - batch + 1)
        x = np.ascontiguousarray(images[at : at + batch])
        began, done = clock(), []
        state = engine.start(x)
        for stage in range(1, engine.stages + 1):
            _, state = engine.step(stage, state, Stop())
            done.append((clock() - began) * 1e3)
        trace.append(tuple(done))
    macs = tuple(net.plan.macs(stage) for stage in net.plan.answering)
    name = device_name(device)
    return Latency(tuple(trace[WARM_UP:]), macs, name, threads, batch, "float32", engine.name)
