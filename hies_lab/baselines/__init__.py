"""Methods of other papers, for sweeps to compare with.

Some choose heads and neurons to remove, which are then cut like those of any criterion. The others remove something
else: inside a `with` block, the model computes what the smaller model would, and nothing is cut or saved.

names.py       names of the baselines, and how they differ from the published methods
flap.py        FLAP: the fluctuation of the inputs of consumers, and their means as a bias; Wanda-sp; Martra
kwon.py        Kwon et al.: Fisher information with its cross terms
channels.py    LLM-Pruner's channel-wise mode: single features of heads
slicing.py     SliceGPT: principal components of attention's inputs and outputs
"""
