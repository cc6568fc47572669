"""If, Loop and Scan: all that is known of them follows from the nodes in their bodies."""
