"""Training of directories: data, steps, states, and the loop.

`sources` and `batches` make batches. `counts` shards a batch for the rank and computes its weight.
`step_trainer` runs steps, `loop` epochs, `run` and `trainer` complete runs; `learning_rate` and
`hyper` have the numbers of a step.
"""
