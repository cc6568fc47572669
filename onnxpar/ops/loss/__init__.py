"""Cross-entropy losses, sharded by rows, by positions and by classes."""
