"""The half of `kvcompress doctor` that needs vLLM: a trial engine, and what is seen in it."""
