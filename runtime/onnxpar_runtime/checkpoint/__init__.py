"""Checkpoints: the states of a run as boxes of global tensors, which any mesh can read.

Shardings appear only as boxes of indices. `contents` reads a checkpoint's manifest, `layout` finds
the boxes that a rank of a directory holds. `writer` writes while training goes on,
`restore` reads a rank's shards, `reshard` makes other checkpoints and weight files of one.
"""
