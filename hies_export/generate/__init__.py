"""Generate text from prompts, to see what a pruned or exported model answers.

The input is a folder (a checkpoint, run in torch, or an ONNX folder, run in ONNX Runtime) and prompts, with or without
images; the output is text, decoded greedily, so that two models can be compared word by word.

- `text.py` continues prompts: `generate_text`.
"""
