"""What runs once, before a model is loaded: flags, seams, refusals, the choice of classes."""
