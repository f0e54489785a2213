"""The README says what works: every command in it is run, every Python block in it is executed."""

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

# A training of hours is run with the same command and a small part of the work.
TINY = "--set train.epochs=1 --set data.limit=64 --set train.batch=32 --set network.blocks=1,1,1 "
TINY += "--set network.widths=4,4,4 --set train.precision=float32"
LESS = {"train cifar10-width": TINY, "paper table1": TINY}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    lines = [
        line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")
    ]
    return [line.partition("  #")[0].strip() for line in lines]


def test_make_knows_the_two_commands() -> None:
    named = [line.split()[1] for line in commands() if line.startswith("make ")]
    assert named == ["demo", "test"]
    for target in named:
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all commands, which build on each other as a reader would type them."""
    return tmp_path_factory.mktemp("reader")


@pytest.mark.parametrize("command", [line for line in commands() if line.startswith("nestling ")])
def test_command(folder: Path, command: str) -> None:
    words = shlex.split(command)
    if any(" ".join(words[1:]).startswith(start) for start in LESS) and not cifar10_is_there():
        pytest.skip("no CIFAR-10 here, and it cannot be fetched")
    for start, less in LESS.items():
        if " ".join(words[1:]).startswith(start):
            words += shlex.split(less)
    done = subprocess.run(
        [sys.executable, "-m", "nestling", *words[1:]], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), f"{command} printed nothing"


@cache
def cifar10_is_there() -> bool:
    """Fetched if need be, as the README says: a reader of it has done so before training on it."""
    cached = Path(os.environ.get("NESTLING_DATA", Path.home() / ".cache" / "nestling")) / "cifar10.safetensors"
    if not cached.exists():
        subprocess.run([sys.executable, "-m", "nestling", "data", "cifar10"], capture_output=True, timeout=600)
    return cached.exists()


PREAMBLE = """
import torch
import torch.nn.functional as F
from nestling import NetworkRecipe
from nestling.nets import build
model = build(NetworkRecipe(name="width-digits"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [(torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))) for _ in range(2)]
before = [p.clone() for p in model.parameters()]
"""


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_block(folder: Path, number: int) -> None:
    code = blocks("python")[number]
    if "for x, y in batches" in code:  # the three lines: in a loop that the reader has already
        code = PREAMBLE + code + "\nassert any(not torch.equal(a, b) for a, b in zip(before, model.parameters()))\n"
    script = folder / f"block{number}.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    if "print(" in code:
        assert done.stdout.strip(), "what a reader is to see was not printed"


def test_the_block_about_your_own_network_says_what_it_made() -> None:
    [block] = [block for block in blocks("python") if "nestling.keep(" in block]
    assert block.strip().splitlines()[-1].startswith("print(")
