"""The KV cache as one array of pages, and how keys and values lie in one."""
