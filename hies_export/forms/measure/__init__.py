"""Count parameters, FLOPs and bytes of models, and describe the machine that they are timed on.

In the order of reading:

- `counts.py`: parameters, FLOPs (total and per layer) and bytes of the key/value cache.
- `shapes.py`: the shapes to measure a model at, and whether it runs there.
- `machine.py`: processor, GPU and library versions, to be read beside the times.
"""
