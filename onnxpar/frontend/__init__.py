"""From a file to a normalised model.

Takes an ONNX file or a callable; gives a checked model with bodies expanded and constants folded.
Begin with `load`; `expand` replaces operators by their bodies.
"""
