"""Search for a strategy: what the user left open, decided by cost.

Takes a `Workload` and a strategy that searches; gives seeds for propagation, and their price.
Begin with `decide`, which compares a searched plan (`find_plan`) with presets (`rival_plans`), and
holds both against the memory of a device, by the peak that the room `cost` prices.
"""
