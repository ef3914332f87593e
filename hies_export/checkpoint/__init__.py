"""Write slim checkpoints and load them back.

A slim checkpoint is a folder of Hugging Face: config.json, safetensors, tokenizer or processor, `hies_plan.json`. Where
no config can describe the shapes, it also holds `modeling_hies.py`. Loading never executes code from the folder.

folders.py    folders and files that appear whole or not at all
contents.py   what a path holds
classes.py    the config and the model class of a checkpoint
schema.py     what the JSON files of a checkpoint must hold
stored.py     the files of a checkpoint's weights, and their dtype
tensors.py    the tensors of safetensors files, read block by block
weights.py    `from_pretrained`, its objections as ours
refits.py     `refit.safetensors`: the refitted layers beside a plan
version4.py   checkpoints whose heads were pruned by transformers 4
loading.py    `load` and `HIESModel`: folder or Hub id -> model
settings.py   settings that transformers leaves out of a saved folder and some readers need
marker.py     what marks a folder as written by this package; leftovers.py: folders of killed runs
save.py       `save_slim`: slim model -> folder, loaded again in every way and compared
"""
