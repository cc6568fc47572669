"""Contractions: MatMul, Gemm, Einsum, mixtures of experts; determinants."""
