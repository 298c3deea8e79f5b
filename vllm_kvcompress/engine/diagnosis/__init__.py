"""The parts of `kvcompress doctor` that need vLLM: installation checks and a trial engine."""
