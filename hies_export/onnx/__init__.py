"""Export to ONNX, check it against torch, and generate with it."""
