"""Implementation of the ``kvcompress`` commands. Needs no vLLM; `health` does not need torch."""
