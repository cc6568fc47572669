"""Recomputation: forward values that the backward pass reads are computed again.

Takes a planned program and the user's options; gives the program with clones of forward nodes.
Begin with `selection` (which nodes), then `clones` (the change of the graph).
"""
