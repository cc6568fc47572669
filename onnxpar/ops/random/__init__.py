"""Operators that draw random numbers, by a counter-based generator: Dropout and others."""
