"""Windows over space: convolutions and pools, with halo exchange."""
