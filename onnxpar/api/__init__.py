"""The functions of the package: each does what one command or one public name does.

Takes paths, models and strategies; gives directories, plans, annotated models, callables.
Begin with `shard_model` (also `plan`); `runtime` is the seam to onnxruntime, `pytorch` to PyTorch.
"""
