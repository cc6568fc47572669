"""Generates text: a language model token by token, its cache in buffers of the runtime.

Takes a directory and prompts; gives new tokens, on all ranks. Begin with `generator`; `steps` runs
the program with its states bound, `sampling` chooses tokens.
"""
