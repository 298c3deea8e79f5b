"""vLLM's attention backends, extended so that each layer reads a block table of its own."""
