"""Write a decoder as one GGUF file for stock llama.cpp, layers of different sizes included.

The input is a dense or slim model and its tokenizer; the output is a folder with `model.gguf`, and an `Export` with
the architecture and how far llama.cpp's outputs are from torch's. What no architecture of llama.cpp can compute is
refused by name before anything is written.

- `architecture.py`: read the sizes of a model off its modules, and choose the architecture of llama.cpp.
- `tensors.py`: the model's weights by GGUF's names, and how they are stored; in 4 bits, rounded by calibration rows.
- `vocabulary.py`: the tokens, merges and flags of a tokenizer.
- `export.py`: `export_gguf`, the whole export.
- `parity.py`: compare what llama.cpp computes, in torch before writing, and in llama.cpp itself if it is installed.
"""
