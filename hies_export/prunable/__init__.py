"""Find the units of a model that can be removed, and rehearse their removal.

The input is a model and a batch; the output is `PrunableModule`s: for each attention layer or feed-forward block, the
rows and columns of its linear layers that belong to each head or neuron, and the attributes that count them. No weight
is read.

find.py             `find_modules`: every kind by its finder
attention.py        `find_attention`: heads; what cannot be cut is refused with the reason
heads.py            heads of models whose attention is code of their own, from the layers that read them
columns.py          one run of the copy: which linear layers read heads, and which features make them
mlp.py              `find_mlp`: neurons, likewise
probe.py            a weightless copy of the model, and which feature reaches which head
observe.py          one run of the copy: inputs and readers of every attention module
reads.py            one run of the copy: inputs of every linear layer, and which feature reaches which column
blocks.py           find the two linear layers of feed-forward blocks from these inputs
rehearse.py         runs with fewer units, to find the attributes that must change
follow.py           kept units -> kept rows and columns, and new values of attributes
"""
