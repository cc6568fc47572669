"""Compares the partitioned program, all ranks in this process, with the undivided one.

Takes an artifact directory and the undivided model, or artifacts for one device; gives a `Case` for
each choice of the symbols' values. Begin with `compare`.
"""
