"""Quantised operators: linear quantisation, integer products, weights in blocks."""
