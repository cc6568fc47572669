"""Fourier transforms: DFT, STFT, windows."""
