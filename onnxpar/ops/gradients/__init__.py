"""Gradient rules, one module per operator family; the families put them into their `OpDef`s."""
