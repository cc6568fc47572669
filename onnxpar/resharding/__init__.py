"""From one sharding of a tensor to another.

Takes two shardings; gives the cheapest sequence of collectives, and writes it into a graph.
Begin with `routes` (the plan), then `shortest_path` (how it is found) and `lowering` (its nodes).
"""
