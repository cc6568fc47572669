"""Sizes as values: Shape, Range, and what a graph computes of small tensors."""
