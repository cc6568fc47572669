"""All that is known about operators: a folder for each family, and one table of their records.

Takes a node; gives its sharding rule, local form, gradient, cost and shapes, as its `OpDef` says.
Begin with `operator` (the record `OpDef`), a family such as `contraction`, and `table`.
`inference` infers shapes with the corrections of all families.
"""
