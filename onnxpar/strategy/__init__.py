"""Strategies: the strategy file, presets, MindSpore's tuples, ONNX annotations.

Takes a strategy and a program; gives `Seeds`, and writes a plan back as a file or as annotations.
Begin with `schema` (the file) and `resolve_strategy` (a strategy applied to a program), which uses
`factor_splits` for MindSpore's tuples; `presets` reads `--strategy`, and `annotation_reader` ONNX's
annotations.
"""

from onnxpar.strategy.presets import load_strategy, strategy_for
from onnxpar.strategy.resolve_strategy import resolve, resolved
from onnxpar.strategy.schema import NodeEntry, Strategy

__all__ = ["NodeEntry", "Strategy", "load_strategy", "resolve", "resolved", "strategy_for"]
