"""Inspect, copy and run torch models without changing them.

Every stage uses these modules. All but the last know nothing of pruning.

linear.py          `nn.Linear` and GPT-2's `Conv1D` as one kind of layer
tokens.py          batches of tokens: positions, padding, random inputs
copies.py          copies of a model that share its weights, or have none
memory.py          weights mapped from a file, and memory given back to the system
modes.py           inside a block: evaluation mode, cache, frozen weights, threads, hooks on layers
text_encoder.py    a SentenceTransformer as one model of transformers, and how it reads texts
attention.py       the attention function of a model, replaced inside a block
kernels.py         attention and the entropy of its rows, without attention maps
internals.py       what transformers, torch and the Hub keep private, or change between releases
modeling_hies.py   the slim model classes; this file is copied into slim checkpoints
"""
