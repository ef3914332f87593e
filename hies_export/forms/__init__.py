"""Hold what runs: a form is a model (dense, slim, or a cascade of both) on a runtime, in bits.

The input is models in memory and the runtimes to run them on; the output is their predictions and times, compared.

In the order of reading:

- `formats.py`: `Export`, the table `FORMATS` of what writes one, an export's options, and its folders for other tools.
- `form.py`: `Form`, and `Forms`, which makes them: every model is exported once for what a runtime reads.
- `time.py`: `time`, which runs forms in turns, loaded as often as a runtime needs, on a batch or a data set's rows.
- `judged.py`: `judge`, and what it returns with the times as the `forms` of report.json; the files of a run.
- `deployment.py`: try the dense model in all forms, and record what a deployment found.
- `latency.py`: predict the time of a cut from those of uniform cuts of each kind.
- `measured.py`: count both models of a run, and time them; the times as the `latency` of report.json.
- `machine.py`: processor, GPU and library versions, to be read beside the times.

Its folders, the lowest first: `runtimes/` run and time a loaded model; `onnx/` and `gguf/` write exports, `openvino/`
one made of the first; `cascade/` joins a slim and a dense classifier.
"""
