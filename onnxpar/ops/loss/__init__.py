"""Cross-entropy losses, split by rows, by positions and by classes."""
