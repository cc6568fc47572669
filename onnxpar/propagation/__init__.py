"""From what the user fixed to the sharding of every operand: seeds to a plan.

Takes a program and `Seeds`; gives a `Plan`, and the reshards in it with reasons (`conflicts`).
Begin with `propagate` (the walk over the graph), then `choice` (how one node is decided).
"""
