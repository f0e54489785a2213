"""A Ray cluster of two nodes trains twelve runs on the digits; the driver is killed on the way, then a node: nothing is lost.

    python benchmarks/two_nodes.py --json results/two-nodes-cpu.json    # fails unless all are bitwise those of local processes

Both nodes are raylets of this machine, with folders of their own: nothing but Ray brings files home.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ray
import torch
from ray.cluster_utils import Cluster as Raylets

from nestling.recipes import named
from nestling.recipes.recipe import override
from nestling.runs.folder import RunDir
from nestling.runs.provenance import source_commit, without_folders
from nestling.studies.sweep.axes import grid_runs
from nestling.studies.sweep.cluster import Cluster
from nestling.studies.sweep.driver import SweepRun, sweep
from nestling.studies.sweep.processes import Processes

SETTINGS = ("train.epochs=3", "train.batch=64", "data.limit=512", "train.diagnostics=false")
GRID = ("strategy.name=sgd,osgd,normsgd", "train.seed=0,1,2,3")


def same(one: Path, other: Path) -> bool:
    (ours, _), (theirs, _) = (RunDir(path).load_tensors("weights.safetensors") for path in (one, other))
    equal = all(torch.equal(ours[key], theirs[key]) for key in theirs)
    return equal and RunDir(one).read_json("results.json") == RunDir(other).read_json("results.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    folder, began = Path(tempfile.mkdtemp(prefix="two-nodes-")), time.monotonic()
    os.environ["RAY_TMPDIR"] = str(folder)  # the addresses of other clusters are not ours
    runs = grid_runs(override(named("digits-width"), SETTINGS), GRID)
    raylets = Raylets(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [raylets.add_node(num_cpus=1), raylets.add_node(num_cpus=1)]
    raylets.wait_for_nodes()
    os.environ["RAY_ADDRESS"] = raylets.address

    # The driver is killed when a first checkpoint is home.
    options = [*(f"--grid={each}" for each in GRID), *(f"--set={each}" for each in SETTINGS)]
    command = ["sweep", "digits-width", *options, "--out", str(folder / "runs"), "--on", "ray", "--quiet"]
    driver = subprocess.Popen([sys.executable, "-m", "nestling", *command])
    while not list((folder / "runs").glob("*/checkpoint.safetensors")):
        assert driver.poll() is None, "the driver ended before it was killed"
        time.sleep(0.1)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    home = len(list((folder / "runs").glob("*/checkpoint.safetensors")))

    # It is called again, and a node is killed while it has a run that has an epoch.
    ray.init(address=raylets.address, log_to_driver=False)
    lost: list[str] = []

    def tell(every: "list[SweepRun]") -> None:
        done = sum(one.state == "finished" for one in every)
        if not lost and done >= 2 and len([one for one in every if "process" in one.where and one.epoch]) > done:
            lost.append("node")
            raylets.remove_node(nodes[1], allow_graceful=False)
        lost.extend(one.name for one in every if one.lost and one.name not in lost)

    every = sweep(runs, folder / "runs", Cluster(), tell=tell)  # type: ignore[arg-type]
    ray.shutdown()
    raylets.shutdown()
    sweep(runs, folder / "local", Processes(2))
    equal = sum(same(folder / "runs" / name, folder / "local" / name) for name, _ in runs)
    seconds = round(time.monotonic() - began)
    found = {
        "command": without_folders(" ".join(["python", *sys.argv])),
        "commit": source_commit()[0],
        "ray": ray.__version__,
        "torch": torch.__version__,
        "runs": len(runs),
        "finished": sum(one.state == "finished" for one in every),
        "bitwise": equal,
        "checkpoints when the driver was killed": home,
        "lost": lost,
        "seconds": seconds,
    }
    print(json.dumps(found))
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1) + "\n")
    assert equal == len(runs) == 12 and len(lost) > 1, (
        "a run is missing or differs, or no node was lost with runs on it"
    )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
