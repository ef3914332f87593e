"""Run and time a model on torch, ONNX Runtime, OpenVINO or llama.cpp through one interface.

The input is a `PreTrainedModel`, an ONNX folder or a GGUF file; the output is a `Runtime`: `prepare(batch)` once,
`run(prepared)` any number of times, `fetch(result)` for the outputs. A runtime raises if its device is missing.

In the order of reading:

- `base.py`: the interface, `Runtime`; `RUNTIMES`, the names that recipes and `--runtime` may use; `load_runtime`.
- `pytorch.py`: `torch` and `torch-compile`.
- `ort.py`: `onnxruntime-cpu` and `onnxruntime-cpu-int8`; also the names of the files in an ONNX folder.
- `ort_gpu.py`: `onnxruntime-cuda`.
- `openvino.py`: `openvino`.
- `llamacpp.py`: `llamacpp`, with `llamacpp.mjs`, which runs the model in Node and times it there.
- `graphs.py`, `bits.py`: edit ONNX graphs, and quantise them.

To add a runtime, write a subclass of `Runtime` under `@register_runtime("name")`, which takes `(source, *, threads)`.
For ONNX Runtime, subclass `OnnxRuntime`; for anything else that reads ONNX graphs, `GraphRuntime`, as `openvino.py`
does. Add its name and module to `RUNTIMES` in `entry_points.py`, or, in another package, an entry point of the group
`hies_export.runtimes`. Recipes, `bench`, latency budgets and the report then accept it; a test compares it with torch.

If it needs a package, add an extra to pyproject.toml, name the extra in `require`, and list the package in
`forms/machine.py`, so that reports show its version. For another format, see `Format` in `forms/formats.py`.
"""
