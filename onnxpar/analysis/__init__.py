"""Pure analyses: a model in, facts out. Nothing here changes a model."""
