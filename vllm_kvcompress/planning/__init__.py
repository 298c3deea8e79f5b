"""Check a model's configuration: whether compression supports it, and how much memory it takes."""
