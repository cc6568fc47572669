"""Training of directories: data, steps, states, and the loop.

`sources` and `batches` make batches. `counts` shards a batch for the rank and computes its weight.
`trainer` runs steps, `loop` epochs; `learning_rate` and `hyper` have the numbers of a step.
"""
