"""Models sharded by FSDP2 train as whole ones do, each rank with its share of every row."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = ("equal", "steps", "mixed precision", "bytes", "not finite", "refusals", "dense")


@pytest.fixture(scope="module", params=[2, 4])
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all cases found on some ranks, in one launch."""
    folder = tmp_path_factory.mktemp("sharded")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(request.param)]
    ran = subprocess.run(
        [*command, str(HERE / "sharded_ranks.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_sharded_models(told: Path, case: str) -> None:
    found = {path.name: path.read_text() for path in told.glob(f"{case}-*")}
    assert found and not any(found.values()), "\n".join(found.values())
