"""Find the units of a model that can be removed, and rehearse their removal.

In go a model and a batch of inputs, out come `PrunableModule`s: for each attention layer, the rows and columns of its
linear layers that belong to each head, and the attributes that count heads. No weight is read.

attention.py        `find_attention`: all of it; what cannot be cut is refused with the reason
probe.py            a weightless copy of the model, and which feature reaches which head
observe.py          one run of the copy: inputs and readers of every attention module
rehearse.py         a run with fewer heads, to find the attributes that must change
follow.py           kept units -> kept rows and columns, and new values of attributes
architectures.py    the table of tested model types, architectures.json
"""
