"""Operators: one module per family, each exporting a tuple of `OpDef`; `ops.table` joins them."""
