#!/bin/bash
# Bits and times of a training step, of one or several source trees, in one run on one GPU (at most 150 s).
#
#   bash benchmarks/trees.sh                    # the tree in the working directory
#   bash benchmarks/trees.sh OLD_TREE .         # two trees, to be compared (OLD_TREE: git archive 2c1cb26 | tar x -C OLD_TREE)
#
# For width-resnet42 and depth-sparse98, SGD and OSGD, batch 128: a hash of weights and statistics after 30 steps (synthetic
# images, fixed seeds), and the median ms of a step. bf16, captured graphs, kernels of our own. Everything goes through each
# tree's own benchmarks/step.py, so it does not care where modules live. All trainings are set up beside one another; then
# they are timed one at a time, trees in turns. CHECK_DEVICE=cpu tries the script itself (eager, float32, small).
here=$PWD
exec timeout ${CHECK_SECONDS:-150} ${PYTHON:-python} - "$here" "${@:-.}" <<'PY'
import os, queue, subprocess, sys, threading, time
from pathlib import Path

CHILD = r'''
import hashlib, os, sys, time
tree, network, strategy, kind, device_name = sys.argv[1:6]
sys.path[:0] = [tree + "/src", tree + "/benchmarks"]
import torch
device = torch.device(device_name)
cpu = device.type == "cpu"
torch.backends.cudnn.deterministic = True
import step
batch, steps, images = (4, 3, 16) if cpu else (128, 30, 50_000)
split = step.images(device, images)
driver = step.Driver(step.recipe_for(network, strategy, batch, "float32" if cpu else "bfloat16"), split, device, kind)
driver.advance(steps - 1)  # the first was made at the start
step.synchronise(device)
net = driver.driver.step.net
whole = hashlib.sha256()
for name, tensor in sorted(net.state_dict().items()):
    whole.update(name.encode())
    whole.update(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes() if tensor.dim() else str(tensor.item()).encode())
tasks = getattr(driver.driver.step, "tasks", None)  # only to say what was timed
made = type(getattr(tasks, "nets", [getattr(driver.driver.step, "forward", None)])[0]).__name__
print("ready", whole.hexdigest()[:16], made, round(driver.startup, 1), flush=True)
for line in sys.stdin:
    count = int(line)
    step.synchronise(device)
    start = time.perf_counter()
    driver.advance(count)
    step.synchronise(device)
    print("ms", 1000 * (time.perf_counter() - start) / count, flush=True)
'''

base, trees = Path(sys.argv[1]), sys.argv[2:]
device = os.environ.get("CHECK_DEVICE", "cuda")
kind = "eager" if device == "cpu" else "full"
networks = ("width-resnet42", "depth-sparse98")
cases = [(network, strategy) for network in networks for strategy in ("sgd", "osgd")]
began = time.time()


class Child:
    def __init__(self, tree, case):
        path = (base / tree).resolve()
        environment = os.environ | {"PYTHONPATH": f"{path}/src", "CUDA_DEVICE_MAX_CONNECTIONS": "32", "OMP_NUM_THREADS": "1"}
        self.log = open(f"/tmp/trees-{os.getpid()}-{abs(hash((tree, case)))}.log", "w+")
        command = [sys.executable, "-c", CHILD, str(path), *case, kind, device]
        self.process = subprocess.Popen(command, cwd=path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.log, text=True)
        self.said = None

    def listen(self):
        for line in self.process.stdout:
            if line.startswith(("ready", "ms")):
                return line.split()
        self.process.wait()
        self.log.seek(0)
        return ["failed", self.log.read()[-1500:]]

    def ask(self, count):
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        word, *found = self.listen()
        return float(found[0]) if word == "ms" else float("nan")


children = {(tree, case): Child(tree, case) for case in cases for tree in trees}
waiting = [threading.Thread(target=lambda c=c: setattr(c, "said", c.listen())) for c in children.values()]
for each in waiting:
    each.start()
for each in waiting:
    each.join()
good = {}
for (tree, case), child in children.items():
    if child.said[0] == "ready":
        good[tree, case] = child
        print(f"{case[0]:15} {case[1]:5} {tree:20} weights {child.said[1]}  by {child.said[2]}, start {child.said[3]} s", flush=True)
    else:
        print(f"{case[0]:15} {case[1]:5} {tree:20} FAILED\n{child.said[1]}", flush=True)
for case in cases:
    hashes = {good[tree, case].said[1] for tree in trees if (tree, case) in good}
    if len(trees) > 1:
        print(f"{case[0]:15} {case[1]:5} {'SAME BITS' if len(hashes) == 1 else 'BITS DIFFER'}", flush=True)
print(f"set up after {time.time() - began:.0f} s", flush=True)

rounds, count = (1, 1) if device == "cpu" else (9, 60)
for case in cases:
    found = {tree: [] for tree in trees if (tree, case) in good}
    for tree in found:  # clocks up
        good[tree, case].ask(count)
    for turn in range(rounds):
        for tree in found if turn % 2 else reversed(found):
            found[tree].append(good[tree, case].ask(count))
    median = {tree: sorted(each)[len(each) // 2] for tree, each in found.items()}
    told = "  ".join(f"{tree} {ms:.4f} (from {min(found[tree]):.4f} to {max(found[tree]):.4f})" for tree, ms in median.items())
    ratio = f"  last/first {median[trees[-1]] / median[trees[0]]:.4f}" if len(median) > 1 else ""
    print(f"{case[0]:15} {case[1]:5} ms: {told}{ratio}", flush=True)
for child in children.values():
    child.process.stdin.close()
    child.process.wait()
print(f"done after {time.time() - began:.0f} s", flush=True)
PY
