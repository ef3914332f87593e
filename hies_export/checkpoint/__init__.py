"""Write slim checkpoints and load them back.

A slim checkpoint is a Hugging Face folder: config.json, safetensors, tokenizer or processor, `hies_plan.json`. If no
config can describe the shapes, it also holds `modeling_hies.py`. Loading never executes code from the folder.

folders.py    folders and files that appear complete or not at all
contents.py   the kind of content that a path holds
classes.py    the config and the model class of a checkpoint
weights.py    the files of a checkpoint's weights, their dtype, and `from_pretrained` with its errors as ours
dense.py      the model to prune: how it is stored, and where it is loaded
refits.py     `refit.safetensors`: the refitted layers beside a plan
loading.py    `load` and `HIESModel`: folder or Hub id -> model, also of heads that transformers 4 pruned
settings.py   settings that some readers need and transformers does not save
companions.py the files beside the weights that are fetched and copied
cards.py      the card of a dense model, and the licence that a slim one inherits from it
save.py       `save_slim`: slim model -> folder, loaded again in every way and compared
apply.py      `apply_plan`: checkpoint, plan -> slim folder
"""
