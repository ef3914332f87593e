"""Methods that sweeps compare with HIES and that remove something other than whole heads.

In go a dense model and a share to remove. Inside a `with` block, the model then computes what the smaller model would.
Nothing is cut or saved.

names.py       names of the baselines, and how they differ from the published methods
channels.py    LLM-Pruner's channel-wise mode: single features of heads
slicing.py     SliceGPT: principal components of what attention reads and writes
"""
