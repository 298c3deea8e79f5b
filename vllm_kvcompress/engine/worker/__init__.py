"""vLLM's workers, extended to follow the scheduler's packing plan."""
