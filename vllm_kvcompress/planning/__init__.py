"""From a model's configuration: its traits, its memory, and the blocks that a request holds."""
