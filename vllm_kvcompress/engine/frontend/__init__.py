"""Code for the process that takes requests: overrides, aliases, metrics and usage."""
