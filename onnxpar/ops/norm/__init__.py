"""Softmax and normalisations of rows, groups and batches, with their statistics."""
