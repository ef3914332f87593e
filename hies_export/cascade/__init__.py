"""Answer with the slim model where it is sure, and with the dense one elsewhere, so that few answers change.

In go both models and held-out rows; out comes a threshold of the margin with a promise about all answers, and one ONNX
graph that computes the dense part only for the rows that need it.

In the order of reading:

- `promise.py`: choose the threshold by a finite-sample bound.
- `cascade.py`: `Cascade`, two models in memory or in any runtime.
- `graph.py`: both models in one graph.
- `export.py`: write that graph, and prove that it answers as the two models do.
"""
