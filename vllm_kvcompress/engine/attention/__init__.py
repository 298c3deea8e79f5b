"""vLLM's attention backends over the flat page pool; each layer reads its own block table."""
