"""The algebra: meshes, shardings, sharding rules, symbolic sizes. It knows no ONNX.

Takes plain numbers, names and expressions; gives frozen dataclasses that every other room uses.
Begin with `mesh`, then `sharding` (how one tensor is split) and `rule` (what of a node may be).
"""
