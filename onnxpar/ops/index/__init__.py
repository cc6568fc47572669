"""Indices: Gather (vocabulary splits), GatherND, OneHot, Scatter, TopK, ArgMax."""
