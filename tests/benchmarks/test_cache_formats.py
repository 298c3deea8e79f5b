"""The simulated low-bit caches must read as vLLM's kernels read what they stored."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.evidence.cache_formats import CACHE_FORMATS

ROOT = Path(__file__).parents[2]
TOKENS, HEADS, KV_HEADS, DIM = 37, 4, 2, 64


@pytest.fixture(scope="module")
def case():
    """Return a query ``[1, Hq, D]``, and keys and values ``[T, Hkv, D]`` with a large channel."""
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(1, HEADS, DIM, generator=generator)
    keys, values = torch.randn(2, TOKENS, KV_HEADS, DIM, generator=generator)
    keys[:, 0, 3] += 40.0
    keys[5, 1, 7] = 700.0  # more than float8 holds
    values[:, 1] *= 0.01
    return {"query": query, "keys": keys, "values": values}


@pytest.fixture(scope="module")
def outputs(case, tmp_path_factory):
    """Return the attention outputs of vLLM's kernels by format."""
    folder = tmp_path_factory.mktemp("caches")
    torch.save(case, folder / "case.pt")
    paths = [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]
    subprocess.run(
        [sys.executable, Path(__file__).with_name("vllm_caches.py"), "case.pt", "outputs.pt"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        check=True,
    )
    return torch.load(folder / "outputs.pt")


def attention(case, keys, values):
    """Return the attention output ``[1, Hq, D]`` in float64."""
    group = HEADS // KV_HEADS
    query = case["query"][0].double().unflatten(0, (KV_HEADS, group))
    logits = torch.einsum("hgd,thd->hgt", query, keys.double()) * DIM**-0.5
    return torch.einsum("hgt,thd->hgd", logits.softmax(-1), values.double()).flatten(0, 1)[None]


@pytest.mark.parametrize("name", CACHE_FORMATS)
def test_a_format_reads_as_vllms_kernels_read_what_they_stored(name, case, outputs):
    stored = CACHE_FORMATS[name].stored(4, 9, case["keys"], case["values"])
    expected = outputs[name].double()
    torch.testing.assert_close(attention(case, *stored), expected, rtol=1e-4, atol=1e-5)
    exact = attention(case, case["keys"], case["values"])
    assert (exact - expected).abs().max() > 1e-3  # otherwise the comparison shows nothing


def test_turboquant_keeps_the_first_and_last_two_layers(case):
    turboquant = CACHE_FORMATS["turboquant_4bit_nc"]
    exact = [
        turboquant.stored(layer, 9, case["keys"], case["values"])[0] is case["keys"]
        for layer in range(9)
    ]
    assert exact == [True, True, *[False] * 5, True, True]
    assert [turboquant.share_of_bytes(layer, 9, DIM) for layer in (0, 4)] == [1.0, 70 / 256]


def test_shares_of_bytes_include_the_scales():
    shares = {name: CACHE_FORMATS[name].share_of_bytes(4, 9, 128) for name in CACHE_FORMATS}
    assert shares == {
        "fp8": 0.5,
        "fp8_per_token_head": 264 / 512,
        "int8_per_token_head": 264 / 512,
        "int4_per_token_head": 136 / 512,
        "turboquant_k8v4": 196 / 512,
        "turboquant_4bit_nc": 134 / 512,
        "turboquant_k3v4_nc": 118 / 512,
        "turboquant_3bit_nc": 102 / 512,
    }
