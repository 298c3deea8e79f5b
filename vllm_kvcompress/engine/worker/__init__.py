"""vLLM's workers with a compressor, and the memory that compression needs."""
