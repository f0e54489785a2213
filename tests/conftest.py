"""What all tests share: one thread each, fixed seeds, few hypothesis examples, the browser if there is one."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for the processes tests start
os.environ.setdefault("RAY_worker_niceness", "0")  # by default Ray's workers come after all other processes

import random
import shutil
import signal
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).parent.parent

# HYPOTHESIS_PROFILE=many looks harder, and elsewhere each time; the default is quick and always the same.
settings.register_profile("few", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("many", max_examples=500, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "few"))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it for what it starts in the background
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # the tests of Ctrl-C, and the processes they start, need it
torch.set_num_threads(1)  # two workers with all cores each would only slow each other down


def finding(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a Python process that finds modules in this folder, too: first, before where we find ours."""
    places = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), **more}


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the system's Chromium; without one the test is skipped and says so."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium on this machine: browser tests skipped")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
    if os.environ.get("PYTEST_XDIST_WORKER"):  # where a Ray that crashes would end other tests, too
        for item in items:
            if item.get_closest_marker("ray"):
                item.add_marker(pytest.mark.skip(reason="a Ray cluster has a process of its own: pytest -m ray"))
