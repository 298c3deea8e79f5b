"""The log-sum-exp that FLASH_ATTN computes for a prefill, kept for the window's queries.

FlashAttention's kernels exist only for CUDA. The loops that replace them return the log-sum-exp as
the kernels do, and only if they are asked for it.
"""

import pytest
import torch

from checkpoints import make, tokens
from engines import V2, engine, settings
from processor import needs_avx512

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not V2, reason="CUDA only uses Model Runner V2"),
]

WINDOW = 16
SNAPKV = settings("snapkv", window=WINDOW)
MODEL, LAYERS = "llama-two-layers", 2


@pytest.fixture
def start(monkeypatch, checkpoints_folder):
    """Return a function that opens an engine on a CUDA backend and a log of its kernel calls."""
    import cuda_on_cpu

    def create(backend="FLASH_ATTN", model=MODEL, version=3, **options):
        seen = cuda_on_cpu.use(monkeypatch, backend, version=version)
        return engine(make(model, checkpoints_folder), **options), seen

    return create


def log_sums_of(layers, query):
    """Return the log-sum-exp ``[N, Hq, w]`` in float64, from the queries and the cached keys."""
    keys = layers.key_pages[layers.pages.long()].double()  # [N, pages, Hkv, D, block]
    keys = keys.permute(0, 2, 1, 4, 3).flatten(2, 3)[:, :, : layers.max_tokens]
    keys = keys.repeat_interleave(query.shape[2] // keys.shape[1], 1)
    logits = torch.einsum("nwhd,nhtd->nhwt", query.double(), keys) * layers.scale
    lengths = layers.lengths
    if lengths is None:
        lengths = torch.full((len(query),), layers.max_tokens)
    last_tokens = lengths[:, None] - query.shape[1] + torch.arange(query.shape[1])
    masked = torch.arange(layers.max_tokens) > last_tokens[:, None, :, None]
    return logits.masked_fill(masked, -torch.inf).logsumexp(-1)


@pytest.fixture
def attentions(monkeypatch):
    """Return a list that gets, for each scored prompt, the kept and the right log-sum-exp."""
    from vllm_kvcompress.methods.method import Method

    recorded = []
    attention = Method.attention

    def recording(method, layers, query, *args, row_log_sums=None, **options):
        right = log_sums_of(layers, query)
        kept = None if row_log_sums is None else row_log_sums.clone()
        recorded.append((kept, right))
        return attention(method, layers, query, *args, row_log_sums=row_log_sums, **options)

    monkeypatch.setattr(Method, "attention", recording)
    return recorded


def assert_right(attentions, prompts):
    assert sum(len(right) for _, right in attentions) == prompts * LAYERS
    for kept, right in attentions:
        assert kept is not None
        assert kept.dtype == torch.float32
        torch.testing.assert_close(kept.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("version", "method"), [(2, "snapkv"), (3, "cake"), (3, "tova")])
def test_log_sums_of_a_prompt_in_one_chunk(start, attentions, version, method):
    opened, seen = start(version=version, additional_config=settings(method))
    with opened as llm:
        llm.generate([tokens(300, seed=1)], 6)
    assert_right(attentions, 1)
    assert seen.log_sums == LAYERS, "only the prefill step asks for it"
    assert seen.calls > 2 * LAYERS


@pytest.mark.parametrize("last_chunk", [WINDOW, WINDOW - 1])
def test_only_a_last_chunk_with_the_whole_window_asks(start, attentions, last_chunk):
    """Earlier chunks do not know that the window begins in them."""
    opened, seen = start(additional_config=SNAPKV, max_num_batched_tokens=96, max_num_seqs=8)
    with opened as llm:
        llm.generate([tokens(3 * 96 + last_chunk, seed=1)], 6)
    if last_chunk == WINDOW:
        assert_right(attentions, 1)
        assert seen.log_sums == LAYERS
    else:
        assert [kept for kept, _ in attentions] == [None]
        assert seen.log_sums == 0


def test_log_sums_after_hits_in_a_batch_and_after_a_preemption(start, attentions):
    """Decodes and uncompressed prompts share the batch."""
    opened, _ = start(additional_config=SNAPKV)
    prompt = tokens(300, seed=1)
    with opened as llm:
        llm.generate([prompt], 2)
        again = llm.outputs([prompt, prompt[:200] + tokens(150, seed=2)], 6)
        assert all(output.num_cached_tokens > 0 for output in again)
        assert_right(attentions, 3)
        llm.submit("decoding", tokens(50, seed=9), 20)
        llm.step()
        for length in (300, 90, 413, 131):
            llm.submit(str(length), tokens(length, seed=length), 4)
        llm.drain()
        assert_right(attentions, 6)
        llm.submit("preempted", tokens(310, seed=1), 12)
        for _ in range(5):
            llm.step()
        llm.preempt(llm.running()[0])
        llm.drain()
    assert_right(attentions, 8)


def test_steps_that_observe_nothing_do_not_ask(start, attentions):
    from vllm.v1.attention.backends import flash_attn

    opened, seen = start(additional_config=settings("snapkv", min_prompt=400))
    kernels = flash_attn.flash_attn_varlen_func
    with opened as llm:
        llm.generate([tokens(length, seed=length) for length in (100, 300)], 6)
        assert seen.calls
        assert not seen.log_sums
        llm.generate([tokens(410, seed=1)], 6)
        assert seen.log_sums == LAYERS
        assert flash_attn.flash_attn_varlen_func is kernels
    assert_right(attentions, 1)


# vLLM's own Triton kernel divides 0 by 0 in padding rows.
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
@pytest.mark.parametrize(
    ("options", "asks_flash_attention"),
    [
        ({"additional_config": settings("h2o")}, False),
        ({"additional_config": settings("streamingllm")}, False),
        ({"additional_config": settings("cake", lookahead=5)}, False),
        ({"additional_config": SNAPKV, "backend": "TRITON_ATTN"}, False),
        ({"additional_config": SNAPKV, "version": 4}, False),
        ({"additional_config": SNAPKV, "model": "gpt-oss"}, False),
        ({"additional_config": settings("snapkv", max_whole=128, piece=96, probe=16)}, True),
        ({"additional_config": settings("snapkv", max_whole=128, piece=96, probe=0)}, True),
    ],
    ids=["sums", "no attention", "look-ahead", "triton", "version 4", "sinks", "probe", "pieces"],
)
def test_prompts_are_scored_without_log_sums(start, attentions, options, asks_flash_attention):
    opened, seen = start(**options)
    with opened as llm:
        llm.generate([tokens(140, seed=1)], 8)
        assert llm.compressor.compressed == 1
    assert asks_flash_attention or not seen.log_sums
    assert all(kept is None for kept, _ in attentions)


@needs_avx512
def test_quantised_caches_are_scored_without_log_sums(checkpoints_folder, attentions):
    model = make(MODEL, checkpoints_folder)
    with engine(model, additional_config=SNAPKV, kv_cache_dtype="fp8_e5m2") as llm:
        asked, compressor = [], llm.compressor
        after_attention = compressor.after_attention

        def recording(*args):
            asked.append(compressor.keeps_log_sums)
            after_attention(*args)

        compressor.after_attention = recording
        llm.generate([tokens(300, seed=1)], 3)
    assert asked == [False] * LAYERS
    assert [kept for kept, _ in attentions] == [None]


def test_results_of_a_merged_attention_are_not_kept(start, attentions, monkeypatch):
    """With cascade attention, vLLM asks for the log-sum-exp of two parts and merges them."""
    from vllm.v1.attention.backends import flash_attn

    opened, _ = start(additional_config=SNAPKV)
    kernels = flash_attn.FA4DenseAttentionKernel.kernel

    def merging(*args, **options):
        return kernels(*args, **options, return_softmax_lse=True)[0]

    with opened as llm:
        monkeypatch.setattr(flash_attn.FA4DenseAttentionKernel, "kernel", staticmethod(merging))
        llm.generate([tokens(300, seed=1)], 3)
    assert [kept for kept, _ in attentions] == [None]


def test_a_failing_layer_restores_the_function(start, monkeypatch):
    from vllm.v1.attention.backends import flash_attn

    from vllm_kvcompress.engine.attention.cuda import _keeping_log_sums

    start(additional_config=SNAPKV)

    def failing(**_options):
        raise ZeroDivisionError

    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", failing)

    def run_layer() -> None:
        with _keeping_log_sums(None):
            assert flash_attn.flash_attn_varlen_func is not failing
            flash_attn.flash_attn_varlen_func(q=torch.zeros(1, 1, 1))

    with pytest.raises(ZeroDivisionError):
        run_layer()
    assert flash_attn.flash_attn_varlen_func is failing
