"""Exported stages by hand, in Python with numpy and onnxruntime alone: every stage's answer until time is up.

python stages.py FOLDER SECONDS < pixels     # float32, normalised, in the order C,H,W; prints "stage class" lines
The pixels of a file, by Pillow, for a shape of [3, 32, 32], with `mean` and `std` of the manifest's network:
    scaled = (np.asarray(Image.open(FILE).convert("RGB").resize((32, 32))) / 255 - mean) / std
    pixels = scaled.transpose(2, 0, 1).astype(np.float32).tobytes()
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime

if len(sys.argv) != 3:
    sys.exit("usage: python stages.py FOLDER SECONDS < pixels")
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
manifest = json.loads((folder / "manifest.json").read_text())
sessions = [onnxruntime.InferenceSession(str(folder / stage["file"])) for stage in manifest["stages"]]
image = np.frombuffer(sys.stdin.buffer.read(), np.float32).reshape(1, *manifest["network"]["shape"])
began, values = time.monotonic(), {"input": image}
for stage, session in zip(manifest["stages"], sessions, strict=True):
    names = ["logits", *stage["gives"]]
    values |= zip(names, session.run(names, {name: values[name] for name in stage["takes"]}), strict=True)
    print(stage["stage"], values["logits"][0].argmax())
    if time.monotonic() - began >= seconds:
        break
