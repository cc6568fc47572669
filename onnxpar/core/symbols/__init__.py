"""Symbolic sizes: constraints that a user states, expressions, and proofs.

`constraints` has `Symbol`, a user's constraint; `expressions` reads and prints sizes;
`symbol_table` proves facts, by the arithmetic of `congruences`. The runtime checks the sizes of a
run in `onnxpar_runtime.symbol_checks`.
"""

from onnxpar.core.symbols.congruences import Facts
from onnxpar.core.symbols.constraints import Symbol
from onnxpar.core.symbols.expressions import (
    Dim,
    as_dim,
    dim_str,
    dim_symbol,
    dim_text,
    safe_name,
    symbol_name,
    symbols_of,
)
from onnxpar.core.symbols.symbol_table import NO_CONSTRAINTS, SymbolTable, ceil_div, exact_div

__all__ = [
    "NO_CONSTRAINTS",
    "Dim",
    "Facts",
    "Symbol",
    "SymbolTable",
    "as_dim",
    "ceil_div",
    "dim_str",
    "dim_symbol",
    "dim_text",
    "exact_div",
    "safe_name",
    "symbol_name",
    "symbols_of",
]
