"""Operators on images: Resize, Upsample, GridSample, RoiAlign."""
