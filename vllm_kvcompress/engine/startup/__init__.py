"""What runs once, before a model is loaded: flags, hooks, refusals, the choice of classes."""
