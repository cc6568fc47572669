"""Training of artifact directories: data, steps, states, and the loop.

A batch enters by `sources` and `batches`, is split for the rank and weighed in `counts`, and goes
through a step in `trainer`; `loop` has epochs, `learning_rate` and `hyper` the numbers of a step.
"""
