"""Search for a strategy: what the user left open, decided by cost.

Takes a `Workload` and a strategy that searches; gives seeds for propagation, and their price.
Begin with `decide` (search against presets), then `find` (one search) and `problem` (its tables).
"""
