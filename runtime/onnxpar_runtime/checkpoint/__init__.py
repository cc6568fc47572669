"""Checkpoints: the states of a run as boxes of global tensors, which any mesh can read.

Nothing here knows of shardings beyond boxes of indices. `contents` is what a checkpoint's manifest
says, `layout` which boxes a rank of an artifact directory holds; `writer` writes while training
goes on, `restore` reads what a rank needs, `reshard` and `export` make other files of one.
"""
