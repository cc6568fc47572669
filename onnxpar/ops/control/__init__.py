"""If, Loop and Scan: their rules and local forms follow from the nodes in their bodies."""
