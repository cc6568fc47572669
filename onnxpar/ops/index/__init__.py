"""Reading and writing at indices: Gather, Scatter, TopK, ArgMax; vocabulary splits."""
