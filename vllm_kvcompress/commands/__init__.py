"""What the commands of ``kvcompress`` do. Nothing here needs vLLM, `health` not even torch."""
