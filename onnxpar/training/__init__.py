"""What training adds to a model: losses, optimizer programs, and which parameters are trained."""
