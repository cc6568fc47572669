"""A program in memory: shapes, views of nodes, builders, bodies, and plans as data.

Takes `onnx_ir` graphs; gives shapes and contents of their values, and builders of new nodes.
Begin with `shapes` and `node_view`; `plan` is the decision that later rooms make and carry out.
"""
