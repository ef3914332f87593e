"""Count parameters, FLOPs and bytes of two models, and time one against the other, both loaded.

The input is a dense and a slim model, batches by (batch, sequence), and the name of a runtime; the output is counts,
and one `LatencyRow` per runtime, dtype, phase and shape, as in report.json's `latency`.

In the order of reading:

- `counts.py`: parameters, FLOPs (total and per layer) and bytes of the key/value cache.
- `shapes.py`: the shapes to measure a model at, and whether it runs there.
- `timing.py`: run dense, slim and control in turns, and check that they are comparable. Returns times in ms.
- `ratios.py`: `compare_latency` of two loaded models: the median of paired ratios, its interval, and the limit
  beyond which a control is noisy.
- `latency_rows.py`: `LatencyRow`, a comparison as a row of report.json, and which rows contradict others.
- `record.py`: dataclasses that read like that file.
- `machine.py`: processor, GPU and library versions, to be read beside the times.
"""
