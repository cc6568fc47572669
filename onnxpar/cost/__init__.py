"""The cost of a plan: seconds of computing and communication, bytes of memory.

Takes a program and its plan; gives the price of each node and of the program.
Begin with `cost_model` (one node), then `price` (a program; `Price.peak` is its memory).
The room `partition` counts the bytes of partitioned programs.
"""
