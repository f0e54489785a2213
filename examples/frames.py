"""Classify a stream of frames while the time for each keeps changing.

    python examples/frames.py runs/digits-width --frames 200

The frames are the run's test images. Every frame has its own budget, as in a program that also has other things to do; what
the network has not finished by then is not waited for. A frame whose budget was generous is refined with what is left.
"""

import argparse
import math
import time
from collections import Counter

import torch

from nestling import Runtime
from nestling.runs.open import resolve

parser = argparse.ArgumentParser()
parser.add_argument("run", help="a run's folder, or the name of a trained network")
parser.add_argument("--frames", type=int, default=200)
options = parser.parse_args()

test = resolve(options.run).data().test
frames = test.pictures(torch.arange(min(options.frames, len(test))))
answered, right, late = Counter[int](), 0, 0.0

with Runtime(options.run, device="cpu") as runtime:
    full = max(0.002, sum(runtime.pace.base))  # seconds through all stages
    for number, frame in enumerate(frames):
        budget = full * (0.8 + 0.7 * math.sin(number / 10))  # from 0.1 to 1.5 times what all stages need
        began = time.monotonic()
        answer = runtime.answer(frame, deadline=budget * 0.6)
        # ... here the program does something with the first answer ...
        answer = answer.refine(deadline=budget - (time.monotonic() - began))
        late = max(late, time.monotonic() - began - budget)
        answered[answer.stage] += 1
        right += bool(answer) and answer.label == int(test.labels[number])
        if number % 20 == 0:
            print(
                f"frame {number:4}  {budget * 1e3:6.2f} ms  stage {answer.stage}  {answer.name:10} {answer.confidence:.2f}"
            )

for stage in range(runtime.spec.stages + 1):
    print(f"{'stage ' + str(stage) if stage else 'no stage'} answered {answered[stage]} frames")
print(f"{100 * right / len(frames):.1f} % right; the latest answer came {late * 1e3:+.2f} ms after its budget")
