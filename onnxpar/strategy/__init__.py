"""Strategies: the strategy file, presets, MindSpore's tuples, ONNX annotations.

Takes what the user says and a program; gives `Seeds`, and writes a plan back as a file.
Begin with `schema` (the file) and `resolve_strategy` (a strategy met with a program), which turns
tuples into splits with `factor_splits`; `presets` reads `--strategy`, `annotation_reader` ONNX's
annotations.
"""

from onnxpar.strategy.presets import load_strategy, strategy_for
from onnxpar.strategy.resolve_strategy import resolve, resolved
from onnxpar.strategy.schema import NodeEntry, Strategy

__all__ = ["NodeEntry", "Strategy", "load_strategy", "resolve", "resolved", "strategy_for"]
