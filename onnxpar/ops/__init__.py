"""What is known of operators: a folder for each family, one table that joins them.

Takes a node; gives its sharding rule, local form, gradient, cost and shapes, as its `OpDef` says.
Begin with `operator` (what an operator must say), a family such as `contraction`, `table`.
Shapes are inferred by `inference`, which joins the corrections of the families.
"""
