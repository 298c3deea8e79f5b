"""Settings for the whole suite; they must precede the first import of Triton or vLLM."""

import os
import random
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

ROOT = Path(__file__).parents[1]
DEMO_MODEL = ROOT / ".cache" / "smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def demo_model() -> str:
    """The real 135M Llama; ``make model`` makes it."""
    if not (DEMO_MODEL / "model.safetensors").exists():
        pytest.fail(f"no demo model in {DEMO_MODEL.name}; run `make model` first")
    return str(DEMO_MODEL)
