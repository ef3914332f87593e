"""Answer with the slim model if it is sure, and otherwise with the dense one, so that few answers change.

The input is both models and held-out rows; the output is a threshold of the margin with a promise about all answers,
and one ONNX graph that computes the dense part only for the rows that need it.

- `threshold.py`: choose the threshold by a finite-sample bound.
- `join.py`: both models in one graph.
- `export.py`: write that graph, prove that it answers as the two models do, and say what a report says of it.
"""
