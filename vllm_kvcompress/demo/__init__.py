"""``make demo``: compare vLLM alone with the compressed server on a small real model."""
