"""Count what a model consists of, and time it beside another.

In go a dense and a slim model, batches by (batch, sequence), and the name of a runtime; out come counts, and one
`LatencyRow` per runtime, dtype, phase and shape, as in report.json's `latency`.

In the order of reading:

- `counts.py`: parameters, FLOPs (in all and per layer) and bytes of the key/value cache.
- `timing.py`: run dense, slim and control in turns, and check that they may be compared. Returns times in ms.
- `ratios.py`: the median of paired ratios, its bootstrap interval, and when a control makes them worthless.
- `latency.py`: timing and statistics together, for two loaded models: `compare_latency`.
- `rows.py`: what one comparison becomes in report.json; `record.py`: how it keeps that file's keys.
- `compare.py`: load two models into a runtime, as often as it needs, and time them at every shape: `time_on`.
- `environment.py`: processor, GPU and versions, without which no time means anything.
"""
