"""Strategies: the strategy file, presets, MindSpore's tuples, and what they mean for a model."""

from onnxpar.strategy.presets import load_strategy, strategy_for
from onnxpar.strategy.resolve import resolve, resolved
from onnxpar.strategy.schema import NodeEntry, Strategy

__all__ = ["NodeEntry", "Strategy", "load_strategy", "resolve", "resolved", "strategy_for"]
