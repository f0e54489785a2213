"""Reading a user's own module: from a torch module to a nested network with its weights.

trace.py watches the module run; read.py says of what kind each operation is (the words are in vocabulary.py) and pen.py enters
it into a sketch, attend.py if it is attention, parted.py if it combines parts of the channels; turn.py and layout.py follow what
only moves; held.py finds the weights. ties.py gives births; assemble.py makes the network; agree.py proves that it does what the
module does. recorded.py and shells.py hold what is taken as it was recorded.
"""
