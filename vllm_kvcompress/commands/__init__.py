"""The subcommands of ``kvcompress``. None imports vLLM, and `health` does not import torch."""
