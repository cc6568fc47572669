"""Operators that are fused: activations, chains of backward nodes, optimizer updates."""
