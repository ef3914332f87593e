"""Cut a checkpoint on disk by a plan, in the memory of a few blocks.

The input is a `PruningPlan` and a dense checkpoint of safetensors; the output is the slim checkpoint. Its files are
those that loading the model, `prune_units` and `save_pretrained` would write, byte for byte.

shards.py     writing safetensors files block by block
renaming.py   which stored tensors become which parameters, and which tensors these become on saving
companions.py the files beside the weights that are copied
skeleton.py   the files of a checkpoint, and its model on the meta device
rewrite.py    stored tensors -> tensors of the slim checkpoint
apply.py      `apply_plan`: all of it, with the checks
"""
