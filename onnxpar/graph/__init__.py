"""A program in memory: shapes, views of nodes, builders, bodies, and plans as data.

Takes `onnx_ir` graphs; gives what is known of their values, and the means to write new nodes.
Begin with `shapes` and `node_view`; `plan` is the decision that later rooms make and carry out.
"""
