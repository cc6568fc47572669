"""From a plan to one program of all ranks.

Takes a program and its plan; gives a rank-generic graph with collectives (`PartitionedModel`).
Begin with `partition`, then `writer`, which walks the nodes and sets padding to identities;
`body_writer` does bodies of control flow, `program_memory` counts the bytes of what was made.
"""
