"""Search for a strategy: what the user left open is decided by cost.

Takes a `Workload` and a strategy that searches; gives seeds for propagation, and their price.
Begin with `decide`, which compares the plan of a search (`find_plan`) with presets (`rival_plans`)
and checks that the peak priced by the room `cost` fits into the memory of a device.
"""
