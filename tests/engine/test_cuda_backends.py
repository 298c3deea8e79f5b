"""FLASH_ATTN and TRITON_ATTN on Model Runner V2, eager and through replayed graphs."""

import pytest
import torch

from checkpoints import make, tokens
from engines import V2, engine, settings, v2_drafts, with_states

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not V2, reason="CUDA runs Model Runner V2 alone"),
]

LENGTHS = (300, 700, 90, 513)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@pytest.fixture
def start(monkeypatch, checkpoints_folder):
    """Start an engine on a CUDA backend; what its attention kernels saw is ``engine.seen``."""
    import cuda_on_cpu

    def starting(backend="FLASH_ATTN", model="llama-gqa", version=3, layout=None, **options):
        if layout is not None:
            monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
        seen = cuda_on_cpu.use(monkeypatch, backend, version=version)
        return engine(make(model, checkpoints_folder), **options), seen

    return starting


@pytest.fixture(scope="module")
def on_the_cpu(checkpoints_folder):
    """CPU_ATTN's answers: the same method on another backend, V1's cache layout and kernels."""
    with engine(make("llama-gqa", checkpoints_folder), additional_config=settings()) as llm:
        return llm.generate(PROMPTS)


@pytest.fixture(scope="module")
def whole(checkpoints_folder):
    with engine(make("llama-gqa", checkpoints_folder)) as llm:
        return llm.generate(PROMPTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flash_attention_answers_as_cpu_attention(start, on_the_cpu, layout):
    opened, seen = start(layout=layout, additional_config=settings())
    with opened as llm:
        free = llm.free_blocks
        assert llm.generate(PROMPTS) == on_the_cpu
        assert llm.compressor.compressed == sum(length >= 128 for length in LENGTHS)
        llm.settle()
        assert llm.free_blocks == free
        assert llm.worker.vllm_config.cache_config.kv_cache_layout == layout
    assert seen.calls
    assert seen.splits == {0}
    assert not seen.plans, "a work plan that was made for other lengths than a layer's"


def test_uncompressed_answers_do_not_change(start, whole):
    opened, _ = start(additional_config=settings(budget=1.0))
    with opened as llm:
        assert llm.generate(PROMPTS) == whole


OPT_IN = {
    "growing": settings("cake", 0.1, decode_budget=32, decode_interval=32, decode_window=8),
    "merging": settings("d2o", 0.1, decode_budget=32, decode_interval=32),
    "pieces": settings("cake", 0.2, window=8, max_whole=128, piece=96),
    "merging pieces": settings("d2o", 0.2, max_whole=128, piece=96),
    "looking ahead": settings("cake", 0.1, lookahead=5),
}


@pytest.mark.parametrize("compress", ["cake", "streamingllm", "tova", *OPT_IN])
def test_replayed_graphs_answer_as_eager_steps(start, monkeypatch, compress):
    """Rows come and go, so that graphs are padded, and a row's request and slot change.

    Growing answers leave their queries from within the graph, and are packed again behind it; the
    steps that pack a piece run without one.
    """
    import cuda_on_cpu

    grows = compress in ("growing", "merging")
    counts = [60 if grows else 20, 14, 18, 9] if compress in OPT_IN else [14, 6, 11, 3]
    config = OPT_IN[compress] if compress in OPT_IN else settings(compress)

    def run(graphs) -> list[list[int]]:
        opened, _ = start(additional_config=config, max_num_seqs=4)
        with opened as llm:
            if graphs is not None:
                graphs.capture(llm)
            free, repacked = llm.free_blocks, llm.watch_repacking()
            names = [
                llm.submit(f"r{i}", prompt, count)
                for i, (prompt, count) in enumerate(zip(PROMPTS, counts, strict=True))
            ]
            names.append(llm.submit("late", PROMPTS[1][:450], 9))
            done = llm.drain()
            llm.settle()
            assert llm.free_blocks == free
            assert len(repacked) >= (2 if grows or "pieces" in compress else 0)
            return [done[name] for name in names]

    eager = run(None)
    graphs = cuda_on_cpu.Graphs(monkeypatch, (1, 2, 4))
    assert run(graphs) == eager
    assert graphs.replays >= 10
    assert graphs.padded


@pytest.mark.skipif(not v2_drafts(), reason="this vLLM's Model Runner V2 does not draft")
@pytest.mark.parametrize("ahead", [0, 5])
def test_trap_08_a_prompt_that_ends_with_rows_for_drafts_is_seen(
    ahead, start, monkeypatch, checkpoints_folder
):
    """A graph has as many rows for each request as it brings drafts, and one more.

    A prompt of which one token is left gets as many, and vLLM runs it as a decode. Nobody needs to
    see that where it looks ahead: the graph keeps the queries, and those of drafts that were not
    taken are written over.
    """
    import cuda_on_cpu
    import interpreter

    interpreter.mend()
    drafts, config = (
        3,
        settings("snapkv" if ahead else "tova", lookahead=ahead, allow_override="all"),
    )
    spec = dict(method="ngram", num_speculative_tokens=drafts, prompt_lookup_min=1)
    ending, model = tokens(12 * 32 + 1, seed=9), make("llama-gqa", checkpoints_folder)
    with engine(model, additional_config=config, enable_prefix_caching=False) as llm:
        expected = llm.generate([ending, *PROMPTS], 10)
    graphs = cuda_on_cpu.Graphs(monkeypatch, (2, 4), drafts)
    opened, _ = start(additional_config=config, speculative_config=spec, max_model_len=1024)
    with opened as llm:
        graphs.capture(llm)
        free = llm.free_blocks
        llm.generate([ending], 2, extra_args={"kv_compress": "off"})  # all but one are cached
        llm.submit("busy", PROMPTS[2], 20)
        for _ in range(4):
            llm.step()
        name, replays = llm.submit("r", ending, 10), graphs.replays
        assert replays
        assert llm.drain()[name] == expected[0]
        assert llm.compressor.compressed == 1
        assert graphs.replays > replays
        assert llm.generate(PROMPTS, 10) == expected[1:]
        llm.settle()
        assert llm.free_blocks == free
    assert graphs.padded


@pytest.mark.parametrize("last", [1, 2])
def test_trap_08_a_prompt_that_ends_with_one_token_is_seen(start, monkeypatch, last):
    """vLLM runs a chunk of one token as a decode: as a graph, whose layers nobody could watch."""
    import cuda_on_cpu

    prompt = tokens(384 + last, seed=9)

    def run(**options) -> list[int]:
        graphs = cuda_on_cpu.Graphs(monkeypatch, (1, 2, 4))
        opened, _ = start(additional_config=settings(), **options)
        with opened as llm:
            graphs.capture(llm)
            answer = llm.generate([prompt])
            assert llm.compressor.compressed == 1
            assert graphs.replays
            return answer[0]

    assert run(max_num_batched_tokens=128, max_num_seqs=4) == run(max_num_seqs=4)


def test_prefix_hits_and_chunks_on_flash_attention(start, on_the_cpu):
    opened, _ = start(additional_config=settings(), max_num_batched_tokens=96, max_num_seqs=8)
    with opened as llm:
        assert llm.generate(PROMPTS) == on_the_cpu
        assert llm.generate(PROMPTS) == on_the_cpu  # warm
        assert llm.generate(PROMPTS[::-1]) == on_the_cpu[::-1]


@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "graphs"])
def test_windows_and_sinks_beside_full_layers(start, monkeypatch, checkpoints_folder, replayed):
    """Windowed layers run vLLM's own classes on tables of their own, captured or not."""
    import cuda_on_cpu

    model, options = "gpt-oss", dict(additional_config=settings(), max_num_seqs=4)
    with engine(make(model, checkpoints_folder), **options) as llm:
        expected = llm.generate(PROMPTS)
    graphs = cuda_on_cpu.Graphs(monkeypatch, (1, 2, 4)) if replayed else None
    opened, seen = start(model=model, **options)
    with opened as llm:
        if graphs is not None:
            graphs.capture(llm)
        free = llm.free_blocks
        assert llm.generate(PROMPTS) == expected
        assert llm.compressor.compressed == sum(length >= 128 for length in LENGTHS)
        llm.settle()
        assert llm.free_blocks == free
    assert seen.calls
    assert graphs is None or graphs.replays >= 5


def test_flash_attention_2(start, on_the_cpu):
    """All other tests here are on version 3."""
    opened, seen = start(version=2, additional_config=settings())
    with opened as llm:
        assert llm.generate(PROMPTS) == on_the_cpu
    assert seen.splits == {0}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # rows of padding
def test_triton_attention_and_our_kernels_all_interpreted(start, monkeypatch):
    """The whole CUDA path: vLLM's Triton attention, and every op of ours on its Triton kernel."""
    import interpreter
    from kvcompress_kernels import contract

    model, prompts = "llama-one-layer", [tokens(n, seed=n) for n in (200, 60)]
    options = dict(model=model, additional_config=settings("caote"), max_num_seqs=2)
    opened, _ = start("FLASH_ATTN", **options)
    with opened as llm:
        expected = llm.generate(prompts, 4)
    interpreter.mend()
    monkeypatch.setattr(contract, "triton_takes", lambda tensor: True)
    opened, _ = start("TRITON_ATTN", **options)
    with opened as llm:
        assert llm.generate(prompts, 4) == expected
        assert llm.compressor.compressed == 1


def test_warming_up_leaves_nothing_behind(start, on_the_cpu):
    opened, _ = start(additional_config=settings())
    with opened as llm:
        free = llm.free_blocks
        llm.compressor.warm_up(2048)
        assert llm.compressor.compressed == 0
        assert llm.generate(PROMPTS) == on_the_cpu
        llm.settle()
        assert llm.free_blocks == free


def test_the_tables_never_move(start):
    """Graphs hold their addresses."""
    opened, _ = start(additional_config=settings())
    with opened as llm:
        pool = llm.compressor.pool
        held = [pool._tables, pool._lengths, pool._packed, pool._row_slots]
        before = [tensor.data_ptr() for tensor in held]
        tables, lengths = pool.tables(
            [0], torch.zeros(4, 3, dtype=torch.int32), torch.ones(4).int(), 4
        )
        llm.generate(PROMPTS)
        assert before == [tensor.data_ptr() for tensor in held]
        assert tables[0].data_ptr() == pool._tables.data_ptr()
        assert [x.data_ptr() for x in lengths] == [x.data_ptr() for x in pool._lengths]


# vLLM's Triton kernel alone divides nothing by nothing in this model's steps, in rows of no token
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
@with_states
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_a_model_with_states_answers_as_on_cpu_attention(start, backend, checkpoints_folder):
    """A block of 96 tokens, in our Triton kernels too."""
    options = dict(additional_config=settings(), max_model_len=1024, enable_prefix_caching=False)
    prompts = PROMPTS[::2]
    with engine(make("granite-96", checkpoints_folder), **options) as llm:
        want = llm.generate(prompts, 4)
    opened, _ = start(backend, model="granite-96", **options)
    with opened as llm:
        free = llm.free_blocks
        assert llm.manager.block_size == 96
        assert llm.generate(prompts, 4) == want
        assert llm.compressor.compressed == 1
        llm.settle()
        assert llm.free_blocks == free
