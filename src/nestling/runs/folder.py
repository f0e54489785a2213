"""A run's folder: what a run leaves behind, written so that a kill or a full disk never spoils it.

Comes in: recipe, log lines, tensors, results. Goes out: the same, or a NestlingError that says which file is
missing, damaged or foreign. Every file but the log is replaced whole; the log grows by lines, and a torn last
line is dropped. Tensors are safetensors with a checksum, all else is JSON; nothing is ever unpickled.
It does not know what the tensors mean or how a run is trained.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from nestling.errors import NestlingError, nearest
from nestling.files import (
    CHECKPOINT,
    CURVE,
    GALLERY,
    LOG,
    MANIFEST,
    NETWORK,
    OUTPUTS,
    PROFILE,
    PROVENANCE,
    RECIPE,
    RESULTS,
    WEIGHTS,
    from_text,
    plain,
    read_bytes,
    saying,
    to_text,
    write_atomically,
)
from nestling.nets.net import NestedNet
from nestling.nets.told import account
from nestling.recipes.recipe import Recipe, from_dict
from nestling.runs.lock import Lock
from nestling.runs.provenance import provenance

SHIPPED = Path(__file__).parent / "shipped"  # run folders that come with nestling, and images to try them on
RECOVER = "restore it from a copy, or train again into another folder"
# What to do about a damaged file that can be made again, or gone without.
REMEDIES = {
    RESULTS: "nestling evaluate {run} writes it anew",
    OUTPUTS: "nestling evaluate {run} writes it anew",
    GALLERY: "nestling evaluate {run} writes it anew",
    PROFILE: "nestling profile {run} measures it anew",
    PROVENANCE: "delete it, the run works without it",
    CURVE: "delete it, the run works without it",
}
FORMAT = "1"  # of our tensor files; raise it when older files can no longer be read


def shipped() -> list[str]:
    """The names of the trained networks that come with nestling: each is a run's folder."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{RECIPE}"))


class RunDir:
    """One run's folder. `create` makes it, `open` finds it; `path` is where it is."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.lock: Lock | None = None

    @classmethod
    def create(cls, path: str | Path) -> "RunDir":
        """An empty run folder; refused where a run left work, cleared where one was killed before that."""
        run = cls(path)
        for name in (CHECKPOINT, WEIGHTS, RESULTS):
            if run.has(name):
                raise NestlingError(
                    f"{run.path} already holds a run ({name} is there); resume it, choose another folder or delete it"
                )
        folder = run._to_write("")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in (RECIPE, PROVENANCE, LOG, NETWORK):
                (run.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise NestlingError(f"cannot make the run folder {run.path}: {error.strerror}; choose another") from error
        return run

    @classmethod
    def open(cls, source: str | Path) -> Self:
        """An existing run folder, one that has a recipe: by its path or, if there is no such path, by the name of a trained
        network that comes with nestling."""
        names = shipped()
        run = cls(SHIPPED / source if str(source) in names and not Path(source).exists() else source)
        if run.has(RECIPE):
            return run
        if run.has(MANIFEST):
            raise NestlingError(
                f"{run.path} holds exported stages, not a run; nestling predict and nestling.Runtime answer with them"
            )
        if run.path.is_dir():
            raise NestlingError(f"{run.path} is not a run folder: it has no {RECIPE}; name the folder of a run")
        near = nearest(run.path.name, [*names, *(each.parent.name for each in run.path.parent.glob(f"*/{RECIPE}"))])
        raise NestlingError(
            f"there is no run folder {run.path}; did you mean {near}? (These come with nestling: {', '.join(names)})"
        )

    @property
    def comes_with_us(self) -> bool:
        """Whether it is one of the trained networks that come with nestling: these are read and never written."""
        return self.path.resolve().parent == SHIPPED.resolve()

    def _to_write(self, name: str) -> Path:
        """Where to write a file of this run; "" is its folder."""
        if self.comes_with_us:
            raise NestlingError(
                f"{self.path.name} comes with nestling and is not changed; copy {self.path} and use the copy, or train a run"
            )
        return self.path / name

    def hold(self) -> None:
        """Until `release`, or until this process ends, no other process holds this folder."""
        folder = self._to_write("")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.lock = Lock(folder)
        except OSError as error:
            raise NestlingError(f"cannot make the run folder {self.path}: {error.strerror}; choose another") from error

    def release(self) -> None:
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def discard(self) -> None:
        """A run that was refused before it began: what `create` made goes, and nothing else."""
        self.release()
        for name in (RECIPE, PROVENANCE):
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds something else
            self.path.rmdir()

    def going_on(self) -> str:
        """What goes on with it: a command, in which what is the user's own is named again, or the call that began it."""
        words: list[str] = []
        with contextlib.suppress(NestlingError):
            words = own_words(self.read_recipe())
        if any(name.startswith(":") for name in words):
            return f'nestling.fit(..., out="{self.path}", resume=True)'
        return " ".join(["nestling train", *words, f"--resume {self.path}"])

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    # The recipe, and where the run came from

    def write_recipe(self, recipe: Recipe) -> None:
        self.write_json(RECIPE, dataclasses.asdict(recipe))

    def read_recipe(self) -> Recipe:
        found = self.read_json(RECIPE)
        try:
            return from_dict(found)
        except NestlingError as error:
            raise NestlingError(f"{self.path / RECIPE}: {error}") from error

    def write_provenance(
        self, command: str, device: str = "cpu", resumed: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        """What made this run. A resumed run keeps its first start and lists later ones under "resumed"."""
        now = provenance(command, device, clock)
        if resumed and self.has(PROVENANCE):
            first = self.read_json(PROVENANCE)
            now = {**first, "resumed": [*first.get("resumed", []), now]}
        self.write_json(PROVENANCE, now)

    # The log: one JSON line per epoch

    def append_log(self, line: Mapping[str, Any]) -> None:
        """Add one line. Call it before save_checkpoint: resuming can cut a line but not invent one."""
        path = self._to_write(LOG)
        text = (to_text(line, indent=None) + "\n").encode()
        with saying(path, len(text), "the lines before it are unchanged"), open(path, "ab") as file:
            end = len(whole_lines(path.read_bytes()))
            file.truncate(end)  # what a kill may have left of an unfinished line
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):  # a second failure must not hide the first
                    os.truncate(path, end)
                raise

    def read_log(self) -> list[dict[str, Any]]:
        """The log's whole lines; an unfinished last one is dropped."""
        path = self.path / LOG
        if not self.has(LOG):
            return []
        lines = []
        for number, line in enumerate(whole_lines(path.read_bytes()).splitlines(), start=1):
            try:
                lines.append(dict[str, Any](from_text(line).items()))
            except (ValueError, AttributeError) as error:
                raise NestlingError(
                    f"{path}, line {number} is not JSON as a run writes it; the log is damaged, delete that line"
                ) from error
        return lines

    def truncate_log(self, epoch: int) -> None:
        """Keep only lines up to and including this epoch, so that the log and the checkpoint agree."""
        kept = [line for line in self.read_log() if line["epoch"] <= epoch]
        text = "".join(to_text(line, indent=None) + "\n" for line in kept)
        write_atomically(self._to_write(LOG), text.encode())

    # Tensors

    def save_weights(self, net: nn.Module) -> None:
        self.save_tensors(WEIGHTS, net.state_dict())

    def write_network(self, net: NestedNet) -> None:
        """What the network is, as data, so that it can be opened without the function that builds it."""
        text = to_text(account(net), indent=None)
        write_atomically(self._to_write(NETWORK), text.encode())

    def load_weights(self, net: nn.Module) -> None:
        """Fill net with this run's weights, every one of them and no other."""
        found, _ = self.load_tensors(WEIGHTS)
        wanted = {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}
        given = {name: tuple(tensor.shape) for name, tensor in found.items()}
        if given != wanted:
            name = sorted(key for key in wanted.keys() | given.keys() if wanted.get(key) != given.get(key))[0]
            raise NestlingError(
                f"{self.path / WEIGHTS} belongs to another network: {name!r} has shape "
                f"{given.get(name, 'none')}, expected {wanted.get(name, 'none')}; "
                f"build the network from this run's {RECIPE}"
            )
        net.load_state_dict(found)

    def save_checkpoint(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        self.save_tensors(CHECKPOINT, tensors, meta)

    def load_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self.load_tensors(CHECKPOINT)

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None) -> None:
        """Replace the file by these tensors, with meta (anything JSON holds) in its header."""
        # Copies: safetensors refuses tensors that share memory or are not contiguous.
        copies = {
            key: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for key, tensor in tensors.items()
        }
        text = json.dumps(plain(meta or {}), sort_keys=True)
        header = {"nestling": name, "format": FORMAT, "meta": text, "sha256": checksum(name, copies, text)}
        write_atomically(self._to_write(name), in_order(safetensors.torch.save(copies, metadata=header)))

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors of a file, as far as it can be read; no tensor is."""
        try:
            with safetensors.safe_open(self.path / name, framework="pt") as file:
                return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (not a dict)
        except Exception:
            self.load_tensors(name)  # which says what is wrong with it
            raise

    def load_tensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors (on the CPU) and meta of a file that save_tensors wrote; anything else is refused."""
        path = self.path / name
        if path.exists() and not path.is_file():  # a pipe may never end
            raise NestlingError(f"{path} is a folder, pipe or device, expected a file; {self._remedy(name)}")
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        except FileNotFoundError as error:
            raise NestlingError(f"there is no {path}; has the run got that far?") from error
        except OSError as error:
            raise NestlingError(f"cannot read {path}: {error}") from error
        except Exception as error:  # safetensors' own error, or JSON or UTF-8 trouble in a spoilt header
            raise NestlingError(
                f"{path} is truncated, damaged or no safetensors file ({error}); {self._remedy(name)}"
            ) from error
        if header.get("nestling") != name or header.get("format") != FORMAT:
            kind = f"{header.get('nestling', 'foreign')!r}, format {header.get('format', 'none')!r}"
            raise NestlingError(
                f"{path} is not ours: found {kind}, expected {name!r}, format {FORMAT!r}; {self._remedy(name)}"
            )
        if header.get("sha256") != checksum(name, tensors, header.get("meta", "")):
            raise NestlingError(f"{path} is damaged: its contents do not match its checksum; {self._remedy(name)}")
        return tensors, from_text(header["meta"])

    # Everything else

    def write_json(self, name: str, value: Any) -> None:
        write_atomically(self._to_write(name), (to_text(value) + "\n").encode())

    def read_json(self, name: str) -> Any:
        path = self.path / name
        try:
            return from_text(read_bytes(path))
        except FileNotFoundError as error:
            raise NestlingError(f"there is no {path}; has the run got that far?") from error
        except OSError as error:
            raise NestlingError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise NestlingError(f"{path} is not JSON ({error}); {self._remedy(name)}") from error

    def read_facts(self, name: str) -> dict[str, Any]:
        """What a JSON file of facts by name says; {} where there is no such file."""
        found = self.read_json(name) if self.has(name) else {}
        if not isinstance(found, dict):
            raise NestlingError(f"{self.path / name} holds no JSON object but {found!r:.40}; {self._remedy(name)}")
        return found

    def _remedy(self, name: str) -> str:
        """What to do about a damaged file of this run."""
        if self.comes_with_us:
            return "install nestling again"
        return REMEDIES.get(name, RECOVER).format(run=self.path)


def own_words(recipe: Recipe) -> list[str]:
    """What a command line says about a network and data of the user's own."""
    named = {
        "": recipe.network.name if recipe.network.own else "",
        "--data": recipe.data.root if recipe.data.name == "own" else "",
        "--teacher": recipe.train.teacher if ":" in recipe.train.teacher else "",
        "--loss": recipe.train.loss,
        "--error": recipe.train.error,
    }
    return [word for option, name in named.items() if name for word in (option, name) if word]


def whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def in_order(file: bytes) -> bytes:
    """A safetensors file with its header sorted: equal tensors and meta give equal bytes, which safetensors leaves to chance."""
    start = 8 + int.from_bytes(file[:8], "little")
    header = json.dumps(json.loads(file[8:start]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + file[start:]


def checksum(name: str, tensors: Mapping[str, Tensor], meta: str) -> str:
    """SHA-256 of all a tensor file says: its name, meta, and each tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(f"{name}\n{meta}\n".encode())
    for key in sorted(tensors):
        tensor = tensors[key]
        digest.update(f"{key}\n{tensor.dtype}\n{tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
