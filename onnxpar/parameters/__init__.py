"""Which initializers are parameters of a model, and which of them are trained.

Takes a model as its exporter wrote it; gives each tensor's origin and role, and the selection.
Begin with `recognise`, then `trainable`; `restore_exported` decides for PyTorch's exports, from
the metadata that `torch_metadata` reads.
"""
