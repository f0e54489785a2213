"""The Runtime: nestling.runtime on a trained network.

In: a NestedNet, the folder of a run, whose recipe, weights, results and profile it reads, the name of a trained network, or a
folder of exported stages.
It builds the engine, warms it up, and takes torch tensors as well as arrays. Deadlines, threads and answers are anytime's
business.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestling.data.image_folder import shown
from nestling.errors import NestlingError
from nestling.export.manifest import read_manifest
from nestling.export.spec import Spec
from nestling.files import MANIFEST, PROFILE, RECIPE
from nestling.nets import NestedNet
from nestling.runs.device import pick_device
from nestling.runs.folder import RunDir
from nestling.runs.latency import Latency, load_profile
from nestling.runs.open import OpenedRun, resolve
from nestling.runs.provenance import device_name
from nestling.runtime.build import build_engine
from nestling.runtime.caller import MEMORY, Anytime
from nestling.runtime.confidence import Outcomes, read_outcomes
from nestling.runtime.engine import Engine, warm_jumps, warm_up
from nestling.runtime.pace import Pace

NetSource = (
    NestedNet | RunDir | str | Path
)  # a network, a run's folder, a trained network's name, or a folder of exported stages


class Runtime(Anytime):
    """`Runtime(source)`: answers by a deadline. Thread-safe; close it, or use it as a context manager."""

    def __init__(
        self,
        source: NetSource,
        device: str = "auto",
        engine: str = "auto",
        threads: int = 1,
        memory: int = MEMORY,
        spec: Spec | None = None,
    ) -> None:
        """`source` is a network, a run's folder, the name of a trained network that comes with nestling, or a folder of exported
        stages. `threads` is for CPUs: 1 keeps its pace on a busy machine, 0 uses all cores. `spec` says more about a bare
        network than its plan does: with a mean and std, uint8 images are normalised."""
        built, known, self.run, self.device = open_source(source, device, engine, threads)
        self._folder = Path(str(source)) if is_export(source) else None
        check_spec(spec or known, known)
        spec = spec or known
        self.profile = find_profile(self.run, built.name, threads, self.device) if self.run else None
        latencies = warm_up(built, spec.shape)
        jumps = warm_jumps(built, spec.shape)
        pace = Pace(latencies, jumps=jumps)
        if self.profile is not None:  # the profile knows the quiet device; how it is now, the warm-up has shown
            profiled = [float(v) for v in np.diff([0.0, *self.profile.median()]) / 1e3]
            quiet = sum(profiled) / sum(latencies)
            pace = Pace(profiled, jumps=[quiet * latency for latency in jumps])
            for stage, latency in enumerate(latencies, start=1):
                pace.observe(stage, latency)
        super().__init__(built, spec, pace, memory)
        self.trace = self.profile.array / 1e3 if self.profile else None
        self._warm()

    def _held_out(self) -> Outcomes:
        if self.run is not None:
            tensors = self.run.outputs()
            return Outcomes.of(tensors["logits"].numpy(), tensors["labels"].numpy())
        return read_outcomes(self._folder) if self._folder else super()._held_out()

    def _to_numpy(self, x: Any) -> Any:
        if type(x) is np.ndarray:  # the usual case
            return x
        return x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else x


def open_source(
    source: NetSource, device: str, engine: str, threads: int
) -> tuple[Engine, Spec, OpenedRun | None, str]:
    """The engine of a network, what is known of it, its run if it has one, and the device it is on."""
    if is_export(source):
        device = "cpu" if device == "auto" else device
        return *open_export(Path(str(source)), device, engine, threads), None, device
    device = str(pick_device(device, "device="))
    if isinstance(source, NestedNet):
        return build_engine(source, device, engine, threads), bare_spec(source), None, device
    run = resolve(source)
    net = run.net()
    known = spec_of(run, net)
    check_spec(known, bare_spec(net))
    return build_engine(net, device, engine, threads), known, run, device


def bare_spec(net: NestedNet) -> Spec:
    """What a network alone tells: shapes and sizes; one row of numbers is taken as scores of classes, called by number."""
    node, head = net.plan.input, net.plan.by_name[net.plan.heads[-1]]
    answer = head.shape(head.channels)
    classes, output = (tuple(map(str, range(head.channels))), ()) if len(answer) == 1 else ((), answer)
    return Spec(net.plan.name, node.shape(node.channels), classes, net.plan.sizes, output=output)


def check_spec(spec: Spec, bare: Spec) -> None:
    """What is said of a network must be true of it."""
    for what, found, expected in (
        ("images of", tuple(spec.shape), bare.shape),
        ("answers of shape", spec.answer, bare.answer)
        if spec.output or bare.output
        else ("class names:", len(spec.classes), len(bare.classes)),
        ("stages:", spec.stages, bare.stages),
    ):
        if found != expected:
            raise NestlingError(
                f"the spec of {spec.name} has {what} {found}, but the network {bare.name} has {expected}; correct the spec"
            )


def is_export(source: object) -> bool:
    """Whether this is the path of a folder of exported stages."""
    return (
        isinstance(source, str | Path) and (Path(source) / MANIFEST).is_file() and not (Path(source) / RECIPE).is_file()
    )


def open_export(folder: Path, device: str, engine: str, threads: int) -> tuple[Engine, Spec]:
    """The engine of exported stages, and what their manifest says of the network."""
    if device != "cpu" or engine not in ("auto", "onnx"):
        raise NestlingError(
            f"{folder} holds exported stages, which ONNX Runtime answers on the CPU; found device={device}, engine={engine}; "
            "name the run they were exported from"
        )
    from nestling.runtime.portable import open_engine  # here, because onnxruntime may be missing

    manifest = read_manifest(folder)
    return open_engine(folder, manifest, threads), manifest.spec


def find_profile(run: RunDir, engine: str, threads: int, device: str) -> Latency | None:
    """The run's profile, if it was measured the way this runtime works: engine, threads, device, single images."""
    if not run.has(PROFILE):
        return None
    found = load_profile(run)
    same = (found.engine, found.device, found.batch) == (engine, device_name(device), 1)
    return found if same and (found.threads == threads or device != "cpu") else None


def spec_of(run: OpenedRun, net: NestedNet) -> Spec:
    """What a run knows about its network: the data need not be where it answers."""
    known = run.known
    errors = tuple(float(row["error"]) for row in known.get("stages", ()))
    classes, mean, std, prior = (tuple(known.get(key, ())) for key in ("classes", "mean", "std", "prior"))
    bare = bare_spec(net)
    output = bare.output or (() if classes else bare.answer)
    data = run.recipe.data
    part = shown(data.size) if data.name == "folder" else 1.0
    return replace(bare, classes=classes, errors=errors, mean=mean, std=std, prior=prior, output=output, part=part)
