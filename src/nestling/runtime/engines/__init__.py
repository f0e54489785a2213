"""The engines: one file each for a way to run the stages of a network. ONNX Runtime's needs no torch."""
