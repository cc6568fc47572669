"""What a plan costs: seconds of computing and communication, bytes of memory.

Takes a program and its plan; gives the price of each node and of the whole.
Begin with `cost_model` (one node), then `price` (a program; `Price.peak` is its memory).
The bytes of programs that were made are counted by the room `partition`.
"""
