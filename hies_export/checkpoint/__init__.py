"""Write slim checkpoints and load them back.

A slim checkpoint is a Hugging Face folder: config.json, safetensors, tokenizer or processor, `hies_plan.json`. If no
config can describe the shapes, it also holds `modeling_hies.py`. Loading never executes code from the folder.

folders.py   folders and files that appear complete or not at all, and the kind of content that a path holds
classes.py   the config and the model class of a checkpoint
weights.py   the files of a checkpoint's weights, their dtype, and `from_pretrained` with its errors as ours
load.py      the model to prune; `load`: folder or Hub id -> model
beside.py    the files beside the weights: fetched, copied and completed; the card and its licence
sentence.py  embedding models and rerankers by sentence-transformers: folder, Hub id or object -> model and back
save.py      `save_slim`: slim model -> folder, loaded again in every way and compared; refits beside a plan
apply.py     `apply_plan`: checkpoint, plan -> slim folder
"""
