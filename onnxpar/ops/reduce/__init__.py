"""Reductions, running sums and products."""
