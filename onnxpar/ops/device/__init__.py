"""What CUDA needs: kernels of its provider, forms for it, operands in host memory."""
