"""Training of artifact directories: states, steps, data, and the loop."""
