"""Export a model to ONNX, prove that the graphs compute what torch computes, and generate with them.

The input is a dense or slim model and a sample batch; the output is a folder with Optimum's file and tensor names, and
an `Export` with the largest difference from torch. A graph beyond the tolerance is not kept.

- `export.py`: `export_onnx`, the whole export of encoders, decoders and vision-language models.
- `trace.py`: run transformers' exporter, keep the axes open, name them.
- `rewrites.py`: repair graphs that the exporter gets wrong, and arrange them for the CPU.
- `decoder.py`: one graph that takes a prompt or continues from a key/value cache.
- `multimodal.py`: the three graphs of a vision-language model.
- `quantize.py`: `quantize_onnx`, a graph in 8 or 4 bits, by what its layers read on calibration rows.
- `generator.py`: `generate_text`, greedy generation from an exported folder or a checkpoint.
- `parity.py`: compare the graphs with torch, on more batches than the traced one.
"""
