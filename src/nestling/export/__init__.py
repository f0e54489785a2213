"""A network as frozen stages: each its own program, with state in and out, written for other engines.

freeze.py cuts a network into frozen programs, fold.py makes them fast, torchstage.py runs them with torch; graph.py writes
ONNX, torch_export.py .pt2, quantise.py 8 bits; spec.py says what the network is, manifest.py what lies in a folder of
stages, and write.py makes such a folder. spec.py and manifest.py need no torch. Nothing here runs a stage by a deadline:
nestling.runtime does, and verifies what was written.
"""
