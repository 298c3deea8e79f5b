"""What travels between processes on vLLM's own objects, each with how to attach and read it."""
