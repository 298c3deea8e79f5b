"""``make demo``: the real server with a real small model, with and without compression."""
