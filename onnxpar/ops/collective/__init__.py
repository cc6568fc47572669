"""Operators of the domain `onnxpar` that order or add up: Barrier, sums over stages."""
