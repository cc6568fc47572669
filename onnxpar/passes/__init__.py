"""The passes: the only code that changes a model. They carry out decisions, they make none."""
