"""What `kvcompress doctor` asks, draws and tells, without vLLM."""
