"""Operators of the domain `onnxpar` that order nodes or communicate: Barrier, sums over stages."""
