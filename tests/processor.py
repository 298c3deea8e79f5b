"""CPU features that vLLM's CPU build needs, as pytest marks."""

import pytest
import torch

AVX512: bool = torch.cpu._is_avx512_supported()

needs_avx512 = pytest.mark.skipif(
    not AVX512,
    reason="vLLM's CPU build has fp8 caches and AMX tiles only on processors with AVX-512",
)

rounds_with_avx512 = pytest.mark.skipif(
    not AVX512,
    reason="without AVX-512, torch rounds matrix products of other shapes differently, which moves"
    " some numbers to another step of a 4-bit format",
)
