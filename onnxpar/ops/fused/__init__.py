"""Fused operators: activations, chains of backward nodes, optimizer updates."""
