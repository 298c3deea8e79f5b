"""What vLLM's CPU build can do on the processor that runs the tests."""

import pytest
import torch

AVX512: bool = torch.cpu._is_avx512_supported()

needs_avx512 = pytest.mark.skipif(
    not AVX512,
    reason="vLLM's CPU build has fp8 caches and AMX's tiles only where the processor has AVX-512",
)
