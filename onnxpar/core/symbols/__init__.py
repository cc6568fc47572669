"""Symbolic sizes: constraints on them, expressions of them, and what can be proved."""

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
from onnxpar.core.symbols.integers import Facts
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
