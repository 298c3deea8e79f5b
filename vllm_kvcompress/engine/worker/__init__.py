"""vLLM's workers with a compressor, and what memory that takes."""
