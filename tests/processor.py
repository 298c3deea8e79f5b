"""CPU features that vLLM's CPU build needs, as pytest marks."""

import pytest
import torch

AVX512: bool = torch.cpu._is_avx512_supported()

needs_avx512 = pytest.mark.skipif(
    not AVX512,
    reason="vLLM's CPU build has fp8 caches and AMX tiles only on processors with AVX-512",
)
