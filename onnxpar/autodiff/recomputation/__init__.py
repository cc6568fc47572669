"""Recomputation: what the backward pass reads of the forward pass is computed again.

Takes a planned program and the user's options; gives the program with clones behind barriers.
Begin with `selection` (which nodes), then `clones` (the change of the graph).
"""
