"""What follows from the rules of a model's nodes, before anything is decided.

Takes a model, its shapes and the table of operators; gives the `Program` that later rooms take.
Begin with `program`; the other modules find layers, host nodes, assumed equalities and index
ranges.
"""
