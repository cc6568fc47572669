"""The algebra: meshes, shardings, sharding rules, symbolic sizes. It knows no ONNX.

Takes plain numbers, names and expressions; gives frozen dataclasses that every other room uses.
Begin with `mesh`, then `sharding` (how one tensor is sharded) and `rule` (how a node may be).
"""
