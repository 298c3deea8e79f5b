"""The parts of `kvcompress doctor` that do not need vLLM: probes, checks and reports."""
