"""Facts that follow from the rules of a model's nodes, before there is a plan.

Takes a model, its shapes and the table of operators; gives the `Program` that later rooms take.
Begin with `program`; the other modules find layers, host nodes, assumed equalities and index
ranges.
"""
