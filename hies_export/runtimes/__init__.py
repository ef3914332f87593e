"""Run a model again and again, on torch or ONNX Runtime, behind one interface that can be timed.

In goes a `PreTrainedModel` or an ONNX folder; out comes a `Runtime`: `prepare(batch)` once, `run(prepared)` as often as
wanted, `fetch(result)` for the outputs. A runtime that cannot run where its name says refuses: it never falls back.

In the order of reading:

- `base.py`: the interface, `Runtime`, and `RUNTIMES`, the names that recipes and `--runtime` may use.
- `pytorch.py`: `torch` and `torch-compile`.
- `ort.py`: `onnxruntime-cpu` and `onnxruntime-cpu-int8`; also the names of the files in an ONNX folder.
- `ort_gpu.py`: `onnxruntime-cuda` and `onnxruntime-tensorrt`.
- `registry.py`: imports those modules, which registers them; `load_runtime`.

To add a runtime, write one module and name it in one line:

1. A subclass of `Runtime` under `@register_runtime("name")`. Its constructor takes `(source, *, threads)`. It defines
   `provider`, `dtype`, `prepare`, `run` and `fetch`; for decoders `decodes` and `prepare_step` too; where a device has
   a clock of its own, `time_ns`. What reads ONNX graphs is best a subclass of `OnnxRuntime`.
2. The module in the import of `registry.py`.

Recipes, `bench`, latency budgets and the report then know it, and a test runs every registered runtime beside torch. If
it needs a package, give it an extra in pyproject.toml that `require` names, and list the package in
`measure/environment.py`, so that reports have its version. A runtime that reads neither models nor ONNX needs an export
as well, in `pipeline/measure.py` and `pipeline/bench.py`.
"""
