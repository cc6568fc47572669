"""Search for a strategy: every node's options, what they cost together, and the choice."""
