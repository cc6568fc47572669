"""Compares the partitioned program, all ranks in this process, with the undivided one.

Takes a directory and the undivided model, or a directory for one device; gives a `Case` for
each choice of the symbols' values. Begin with `compare`.
"""
