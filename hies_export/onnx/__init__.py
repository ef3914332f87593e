"""Export a model to ONNX, prove that the graphs compute what torch computes, and generate with them.

In go a dense or slim model and a sample batch; out comes a folder with Optimum's file and tensor names, and an
`OnnxExport` that says how far it is from torch. A graph that differs is not kept.

In the order of reading:

- `export.py`: `export_onnx`, all steps for encoders, decoders and vision-language models.
- `trace.py`: run transformers' exporter, keep the axes open, name them.
- `repair.py`: mend what the exporter gets wrong or stores twice.
- `decoder.py`: one graph that takes a prompt or continues from a key/value cache.
- `multimodal.py`: the three graphs of a vision-language model.
- `generator.py`: `OnnxGenerator`, greedy generation from an exported folder.
- `parity.py`: compare the graphs with torch, on more batches than the traced one.
"""
