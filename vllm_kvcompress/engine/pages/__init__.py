"""The KV cache as one array of pages, and the memory layout of a page."""
