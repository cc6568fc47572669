"""From a plan to one program of all ranks.

Takes a program and its plan; gives one graph for all ranks, with collectives (`PartitionedModel`).
Begin with `partition`, then `writer`, which walks the nodes and masks padding; `body_writer` writes
bodies of control flow, and `program_memory` counts the bytes that a rank holds for a program.
"""
