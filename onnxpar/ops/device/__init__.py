"""CUDA: the kernels of onnxruntime's provider, and the forms of graphs that suit it."""
