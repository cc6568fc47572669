"""Views and rearrangements: Reshape, Transpose, Slice, Split, Concat, Pad, Tile."""
