"""Find the units of a model that can be removed, and rehearse their removal.

The input is a model, of which no weight is read, and a batch; the output is `PrunableModule`s.

units.py      the values: modules, their units, and which of these a selection keeps
find.py       `find_modules`: every kind by its finder
heads.py      `find_attention`: heads that the attention function gets; what cannot be cut is refused with the reason
own_heads.py  heads of models whose attention is code of their own, from the layers that read them
neurons.py    `find_mlp`: the two linear layers of feed-forward blocks, and their neurons
probe.py      a weightless copy of the model, and which feature reaches which head
reads.py      one run of the copy: inputs of every linear layer, and which feature reaches which column
counts.py     parameters, FLOPs (total and by layer) and bytes of the key/value cache of a model
shapes.py     the shapes to count and time a model at, and whether it runs there
rehearse.py   kept units -> kept rows and columns; runs with fewer units, to find the attributes that must change
"""
