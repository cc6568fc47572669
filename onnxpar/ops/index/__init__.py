"""Operators with indices: Gather (a vocabulary may be sharded), Scatter, OneHot, TopK, ArgMax."""
