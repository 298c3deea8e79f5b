import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import INTERPRETED, TOLERANCE, property_test
from kvcompress_kernels.column_sums import column_sums, reference
from kvcompress_kernels.column_sums import cpu as column_sums_cpu
from paging import LargestStorage, paged_keys

pytestmark = pytest.mark.gpu

prop = property_test(25, interpreted=5)


def random(heads, kv_heads, tokens, count, dim, *, seed=0, q_scale=1.0, dtype=torch.float32):
    """Return a random query ``[Hq, T, d]`` and keys ``[Hkv, S, d]``."""
    rng = np.random.RandomState(seed)
    q = torch.from_numpy(q_scale * rng.standard_normal((heads, count, dim))).to(dtype)
    return q, torch.from_numpy(rng.standard_normal((kv_heads, tokens, dim))).to(dtype)


def compare(q, k, block, *, tolerance=TOLERANCE, **kwargs):
    scale = q.shape[-1] ** -0.5
    view, pages = paged_keys(k, block, dtype=k.dtype, **kwargs)
    arguments = q.transpose(0, 1), view, pages, k.shape[1], scale
    got = column_sums(*arguments)
    assert got.shape == (len(q), k.shape[1])
    torch.testing.assert_close(got, reference.run(*arguments), **tolerance)
    return got


@pytest.mark.parametrize(
    ("seed", "heads", "kv_heads", "tokens", "dim", "block"),
    [
        *((11, 2, 2, 12, 4, block) for block in (1, 7, 32, "S")),
        *((13, 4, 1, 37, 8, block) for block in (1, 7, 32, "S")),
        *((14, 6, 2, 101, 16, block) for block in (1, 32)),
        *((15, 9, 3, 129 if INTERPRETED else 257, 64, block) for block in (7, "S")),
        *((0, 1, 1, 1, 4, block) for block in (1, 7)),
    ],
)
def test_shapes_in_docs_match_the_reference(seed, heads, kv_heads, tokens, dim, block):
    q, k = random(heads, kv_heads, tokens, tokens, dim, seed=seed, q_scale=1.5)
    compare(q, k, tokens if block == "S" else block)


@pytest.mark.parametrize("tokens", [31, 32, 33, 64, 65, 96, 97])
@pytest.mark.parametrize("count", [1, 2, 30, 31])
def test_last_chunk_matches_the_reference(tokens, count):
    """Test lengths around a block of rows, and chunks that start at even and odd positions."""
    compare(*random(4, 2, tokens, count, 8, seed=tokens), 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1)])
def test_dtypes_and_strides(heads, kv_heads, interleave, dtype):
    q, k = random(heads, kv_heads, 75, 40, 8, dtype=dtype)
    compare(q, k, 16, interleave=interleave)


@prop
@given(
    st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 2), (8, 1)]),
    st.integers(1, 80),
    st.sampled_from([1, 3, 8, 32]),
    st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    st.integers(0, 1000),
    st.data(),
)
def test_any_shape(heads, tokens, block, q_scale, seed, data):
    count = data.draw(st.integers(1, tokens))
    q, k = random(*heads, tokens, count, 4, seed=seed, q_scale=q_scale)
    got = compare(q, k, block, seed=seed)
    np.testing.assert_allclose(got.sum(1), np.full(heads[0], count), rtol=1e-5)
    rows_that_see = torch.arange(tokens, 0, -1).clamp_max(count)
    assert (got <= rows_that_see * (1 + 1e-5)).all()
    assert (got >= 0).all()


@pytest.mark.parametrize(
    "chunk", [pytest.param(1, marks=pytest.mark.cpu), 13, 64]
)  # Chunks of one token take minutes in the interpreter.
def test_chunks_add_up_to_the_prompt(chunk):
    tokens = 97 if INTERPRETED else 151
    q, k = random(6, 2, tokens, tokens, 16)
    view, pages = paged_keys(k, 32)
    query = q.transpose(0, 1)
    total = torch.zeros(6, tokens)
    for start in range(0, tokens, chunk):
        stop = min(start + chunk, tokens)
        part = column_sums(query[start:stop], view, pages[: -(-stop // 32)], stop, 0.25)
        total[:, :stop] += part
    want = column_sums(query, view, pages, tokens, 0.25)
    torch.testing.assert_close(total, want, rtol=2e-6, atol=1e-6)


def test_token_with_nine_tenths_of_the_attention():
    """A logit of ln(9 S) against 0 gives one sum in the hundreds and all others below 1."""
    tokens = 400
    q, k = torch.zeros(2, tokens, 4), torch.zeros(1, tokens, 4)
    q[..., 0], k[0, 0, 0] = 1.0, 2 * float(np.log(9 * tokens))
    q[..., 1:] = 0.1 * torch.randn(2, tokens, 3)
    got = compare(q, k, 32)
    assert (got[:, 0] > 0.9 * tokens).all()


@pytest.mark.parametrize("shift", [-300.0, -95.0, 95.0, 300.0])
def test_logits_whose_exp_leaves_float32(shift):
    """Adding a constant to one head's logits changes nothing, even if exp over- or underflows."""
    q, k = random(4, 2, 60, 60, 4)
    k[..., 0] = 2.0
    q[..., 0] = torch.tensor([0.0, 0.0, shift, 0.0])[:, None]
    compare(q, k, 16, tolerance={"rtol": 1e-3, "atol": 1e-5})  # One ulp of 300 is 3e-5.


def test_overflowing_future_logits_are_masked():
    """The last key is huge and must not affect earlier rows."""
    q, k = torch.ones(1, 40, 4), torch.zeros(1, 40, 4)
    k[:, -1] = 1e4
    want = np.append(np.cumsum(1 / np.arange(39, 0, -1))[::-1], 1.0)
    np.testing.assert_allclose(compare(q, k, 16)[0], want, **TOLERANCE)


@pytest.mark.cpu
@pytest.mark.parametrize("keys", [1, 30 * 64, 64 * 64])
@pytest.mark.parametrize("count", [1, 20, 129])
def test_spans_of_keys_match_the_reference(count, keys, monkeypatch):
    q, k = random(6, 2, 129, count, 8, q_scale=2.0)
    monkeypatch.setattr(column_sums_cpu, "KEYS", keys)
    compare(q, k, 16)


@pytest.mark.cpu
def test_spans_with_logits_whose_exp_leaves_float32(monkeypatch):
    q, k = random(2, 1, 60, 60, 4, q_scale=100.0)
    monkeypatch.setattr(column_sums_cpu, "KEYS", 16 * 16)
    compare(q, k, 16, tolerance={"rtol": 1e-3, "atol": 1e-4})


def test_strided_query():
    """The query is a slice of a batch and of a fused projection."""
    view, pages = paged_keys(torch.randn(2, 40, 8), 16)
    q = torch.randn(50, 4, 24)[3:23, :, 8:16]
    one = column_sums(q, view, pages, 40, 0.3)
    assert torch.equal(one, column_sums(q.contiguous(), view, pages, 40, 0.3))


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("heads", "tokens", "count"), [(9, 6000, 70), (9, 1500, 1500), (36, 3000, 40)]
)
def test_temporaries_stay_within_the_limit(heads, tokens, count):
    """The full attention matrix of 1500 tokens and 9 heads would take 81 MB."""
    key_pages, pages = torch.randn(1, 3, 64, tokens), torch.tensor([0])
    query = torch.randn(count, heads, 64)
    with LargestStorage() as largest:
        column_sums(query, key_pages, pages, tokens, 0.125)
    assert largest.size <= column_sums_cpu.LOGITS


@pytest.mark.usefixtures("triton_runs")
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float64), (torch.float32, torch.half)])
def test_triton_rejects_float64_and_mixed_dtypes(dtypes):
    view, pages = paged_keys(torch.randn(2, 40, 8), 16, dtype=dtypes[1])
    with pytest.raises(ValueError, match=f"got .*{dtypes[0]}"):
        column_sums(torch.randn(40, 4, 8, dtype=dtypes[0]), view, pages, 40, 0.3)


GOOD = {"query": (4, 4, 8), "key_pages": (5, 2, 8, 16), "pages": (3,), "tokens": 40}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": (4, 8)}, "values to unpack"),
        ({"query": (4, 4, 6)}, "key_pages must have head dim 6; got 8"),
        ({"query": (4, 3, 8)}, "Hq must be a multiple of Hkv=2; got 3"),
        ({"query": (0, 4, 8)}, r"0 < T <= tokens must hold; got \(0, 40\)"),
        ({"query": (41, 4, 8)}, r"0 < T <= tokens must hold; got \(41, 40\)"),
        ({"key_pages": (5, 2, 8)}, r"key_pages must be \[N, Hkv, D, bs\]; got \(5, 2, 8\)"),
        ({"key_pages": (5, 2, 16, 8)}, "key_pages must have head dim 8; got 16"),
        ({"pages": (2,)}, r"pages must be \[3\]; got \(2,\)"),
        ({"tokens": 49}, r"pages must be \[4\]; got \(3,\)"),
        ({"tokens": 0}, r"0 < T <= tokens must hold; got \(4, 0\)"),
    ],
)
def test_shapes_are_checked(change, message):
    def call(case):
        column_sums(
            torch.zeros(case["query"]),
            torch.zeros(case["key_pages"]),
            torch.zeros(case["pages"], dtype=torch.int64),
            case["tokens"],
            1.0,
        )

    call(GOOD)
    with pytest.raises(ValueError, match=message):
        call(GOOD | change)
