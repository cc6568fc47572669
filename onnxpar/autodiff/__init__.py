"""From a model to the programs that train it, on the undivided graph.

Takes a model, a loss and an optimizer; gives the forward, backward and optimizer programs.
Begin with `training_program`, then `differentiate`; `recomputation` trades time for memory.
"""
