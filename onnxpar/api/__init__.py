"""The functions of the package: each does what one command or one public name does.

Takes paths, models and strategies; gives directories, plans, annotated models, callables.
Begin with `compiler` (`shard_model`, `plan`); `runtime` is the seam to onnxruntime and MPI.
"""
