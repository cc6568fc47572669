"""Elementwise operators and casts: every dim is parallel, with broadcasting."""
