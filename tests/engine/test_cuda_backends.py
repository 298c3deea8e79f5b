"""FLASH_ATTN and TRITON_ATTN on Model Runner V2, in eager mode and with replayed CUDA graphs."""

import pytest
import torch

from checkpoints import make, tokens
from engines import V2, engine, settings, v2_drafts, with_states

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not V2, reason="CUDA only uses Model Runner V2"),
]

MODEL = "llama-two-layers"
LENGTHS = (330, 450, 90, 300)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@pytest.fixture
def start(monkeypatch, checkpoints_folder):
    """Return a function that creates an engine on a CUDA backend and a log of its kernel calls."""
    import cuda_on_cpu

    def create(backend="FLASH_ATTN", model=MODEL, version=3, layout=None, **options):
        if layout is not None:
            monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
        seen = cuda_on_cpu.use(monkeypatch, backend, version=version)
        return engine(make(model, checkpoints_folder), **options), seen

    return create


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make(MODEL, checkpoints_folder)


@pytest.fixture(scope="module")
def cpu_outputs(model):
    """Outputs of CPU_ATTN with the same method."""
    with engine(model, additional_config=settings()) as llm:
        return llm.generate(PROMPTS)


@pytest.fixture(scope="module")
def uncompressed_outputs(model):
    with engine(model) as llm:
        return llm.generate(PROMPTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flash_attention_matches_cpu_attention(start, cpu_outputs, layout):
    opened, seen = start(layout=layout, additional_config=settings())
    with opened as llm:
        free = llm.free_blocks
        assert llm.generate(PROMPTS) == cpu_outputs
        assert llm.compressor.compressed == sum(length >= 128 for length in LENGTHS)
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free
        assert llm.worker.vllm_config.cache_config.kv_cache_layout == layout
    assert seen.calls
    assert seen.splits == {0}
    assert not seen.plans, "a precomputed work plan would have the lengths of another layer"


@pytest.fixture(scope="module")
def cpu_outputs_in_groups(checkpoints_folder):
    with engine(make(f"{MODEL}-d64", checkpoints_folder), additional_config=OPT_IN["k4v3"]) as llm:
        return llm.generate(PROMPTS)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # from padding rows
@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("FLASH_ATTN", "LBNHC"),
        ("FLASH_ATTN", "LHBNC"),
        ("FLASH_ATTN", "BLHNC"),
        ("TRITON_ATTN", "BHLNC"),
    ],
)
def test_packed_groups_match_those_of_cpu_attention(start, cpu_outputs_in_groups, backend, layout):
    """Heads and layers may lie between the rows of a group."""
    # in Triton's interpreter, the time of a prefill grows with the square of its length
    every, num_tokens = (2, 5) if backend == "TRITON_ATTN" else (1, 12)
    expected = [output[:num_tokens] for output in cpu_outputs_in_groups[::every]]
    opened, _ = start(backend, f"{MODEL}-d64", layout=layout, additional_config=OPT_IN["k4v3"])
    with opened as llm:
        free = llm.free_blocks
        assert llm.generate(PROMPTS[::every], num_tokens) == expected
        # a page of 256 tokens, and the last 32 and more
        assert llm.compressor.compressed == sum(length >= 320 for length in LENGTHS[::every])
        assert llm.free_blocks == free


def test_uncompressed_outputs_do_not_change(start, uncompressed_outputs):
    opened, _ = start(additional_config=settings(budget=1.0))
    with opened as llm:
        assert llm.generate(PROMPTS) == uncompressed_outputs


OPT_IN = {
    "growing": settings("cake", 0.1, decode_budget=32, decode_interval=32, decode_window=8),
    "merging": settings("d2o", 0.1, decode_budget=32, decode_interval=32),
    "pieces": settings("cake", 0.2, window=8, max_whole=128, piece=96),
    "looking ahead": settings("cake", 0.1, lookahead=5),
    "k4v3": settings("cake", 0.5, packed_dtype="k4v3"),
    "all in k4v3": settings("snapkv", 1.0, packed_dtype="k4v3"),
}
# k4v3 needs a head dim of 64
MODELS = dict.fromkeys(["k4v3", "all in k4v3"], f"{MODEL}-d64")


@pytest.mark.parametrize("compress", ["cake", "streamingllm", *OPT_IN])
def test_replayed_graphs_match_eager_steps(start, monkeypatch, compress):
    """Requests start and finish, so graphs are padded and rows change their request and slot.

    Growing outputs store their queries inside the graph and are packed after it. Steps that pack a
    piece run without a graph.
    """
    import cuda_on_cpu

    grows = compress in ("growing", "merging")
    counts = [60 if grows else 16, 10, 13, 7] if compress in OPT_IN else [14, 6, 11, 3]
    config = OPT_IN[compress] if compress in OPT_IN else settings(compress)

    def run(graphs) -> list[list[int]]:
        model = MODELS.get(compress, MODEL)
        opened, _ = start(model=model, additional_config=config, max_num_seqs=4)
        with opened as llm:
            if graphs is not None:
                graphs.capture(llm)
            free, repacked = llm.free_blocks, llm.watch_repacking()
            names = [
                llm.submit(f"r{i}", prompt, count)
                for i, (prompt, count) in enumerate(zip(PROMPTS, counts, strict=True))
            ]
            names.append(llm.submit("late", PROMPTS[1][:250], 9))
            done = llm.drain()
            llm.finish_in_flight_steps()
            assert llm.free_blocks == free
            assert len(repacked) >= (2 if grows or "pieces" in compress else 0)
            return [done[name] for name in names]

    eager = run(None)
    graphs = cuda_on_cpu.Graphs(monkeypatch, (1, 2, 4))
    assert run(graphs) == eager
    assert graphs.replays >= 10
    assert graphs.padded


def test_queries_are_stored_only_in_steps_with_a_look_ahead(start):
    """Without graphs, prefill and decode steps of other requests store no queries."""
    opened, _ = start(additional_config=settings("cake", 0.1, lookahead=5))
    with opened as llm:
        ring, stored, launched = llm.compressor.pool.ring, [], []
        store, compute = ring.store, ring._compute_indices
        ring.store = lambda layer, query: (stored.append(layer), store(layer, query))
        ring._compute_indices = lambda: (launched.append(1), compute())
        llm.generate([PROMPTS[2]], 12)  # too short to be compressed
        assert (stored, launched) == ([], [])
        llm.submit("long", PROMPTS[0], 30)
        steps = []
        while llm.running() or not steps:
            stored.clear()
            llm.step()
            steps.append(len(stored))
        # the end of the prefill and five output tokens, each with all layers
        layers = len(llm.compressor.pool.layer_offset)
        assert steps == [layers] * 6 + [0] * 24
        assert llm.compressor.compressed == 1


@pytest.mark.skipif(not v2_drafts(), reason="this vLLM's Model Runner V2 does not draft")
@pytest.mark.parametrize("ahead", [0, 5])
def test_trap_08_prompt_end_padded_with_drafts_is_observed(ahead, start, monkeypatch, model):
    """A graph has one token per draft, plus one, for each request.

    vLLM pads a prompt with one token left to that size and runs it as a decode. With a look-ahead
    this step needs no observation: the graph stores the queries, and queries of rejected drafts are
    overwritten.
    """
    import cuda_on_cpu
    import interpreter

    interpreter.install_fixes()
    drafts, config = (
        3,
        settings("snapkv" if ahead else "tova", lookahead=ahead, allow_override="all"),
    )
    spec = dict(method="ngram", num_speculative_tokens=drafts, prompt_lookup_min=1)
    ending = tokens(12 * 32 + 1, seed=9)
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
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free
    assert graphs.padded


@pytest.mark.parametrize("last", [1, 2])
def test_trap_08_one_token_prompt_end_is_observed(start, monkeypatch, last):
    """vLLM runs a one-token chunk as a decode step, whose graph would hide the layers from us."""
    import cuda_on_cpu

    prompt = tokens(384 + last, seed=9)

    def run(**options) -> list[int]:
        graphs = cuda_on_cpu.Graphs(monkeypatch, (1, 2, 4))
        opened, _ = start(additional_config=settings(), **options)
        with opened as llm:
            graphs.capture(llm)
            (output,) = llm.generate([prompt])
            assert llm.compressor.compressed == 1
            assert graphs.replays
            return output

    assert run(max_num_batched_tokens=128, max_num_seqs=4) == run(max_num_seqs=4)


def test_flash_attention_with_prefix_cache_and_chunked_prefill(start, cpu_outputs):
    opened, _ = start(additional_config=settings(), max_num_batched_tokens=96, max_num_seqs=8)
    with opened as llm:
        assert llm.generate(PROMPTS) == cpu_outputs
        assert llm.generate(PROMPTS) == cpu_outputs  # warm
        assert llm.generate(PROMPTS[::-1]) == cpu_outputs[::-1]


@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "graphs"])
def test_sliding_windows_and_sinks_match_cpu_attention(
    start, monkeypatch, checkpoints_folder, replayed
):
    """Sliding-window layers use vLLM's classes and their own block tables, captured or not."""
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
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free
    assert seen.calls
    assert graphs is None or graphs.replays >= 5


def test_flash_attention_2_matches_cpu_attention(start, cpu_outputs):
    """All other tests in this file use version 3."""
    opened, seen = start(version=2, additional_config=settings())
    with opened as llm:
        assert llm.generate(PROMPTS) == cpu_outputs
    assert seen.splits == {0}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # from padding rows
@pytest.mark.parametrize(
    ("model", "config"),
    [("llama-one-layer", settings("caote")), ("llama-one-layer-d64", OPT_IN["k4v3"])],
    ids=["tokens", "groups"],
)
def test_interpreted_triton_kernels_match_flash_attention(start, monkeypatch, model, config):
    """Run the full CUDA path: vLLM's Triton attention and the Triton kernel of each of our ops."""
    import interpreter
    from kvcompress_kernels import contract

    prompts = [tokens(n, seed=n) for n in (330, 60)]
    options = dict(model=model, additional_config=config, max_num_seqs=2)
    opened, _ = start("FLASH_ATTN", **options)
    with opened as llm:
        expected = llm.generate(prompts, 4)
    interpreter.install_fixes()
    monkeypatch.setattr(contract, "runs_triton", lambda tensor: True)
    opened, _ = start("TRITON_ATTN", **options)
    with opened as llm:
        assert llm.generate(prompts, 4) == expected
        assert llm.compressor.compressed == 1


def test_warm_up_leaves_no_state(start, cpu_outputs):
    opened, _ = start(additional_config=settings())
    with opened as llm:
        free = llm.free_blocks
        llm.compressor.warm_up(2048)
        assert llm.compressor.compressed == 0
        assert llm.generate(PROMPTS) == cpu_outputs
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free


def test_tables_keep_their_addresses(start):
    """CUDA graphs record their addresses."""
    opened, _ = start(additional_config=settings())
    with opened as llm:
        pool = llm.compressor.pool
        persistent = [pool._tables, pool._lengths, pool._packed, pool._row_slots]
        before = [tensor.data_ptr() for tensor in persistent]
        tables, lengths = pool.tables(
            [0], torch.zeros(4, 3, dtype=torch.int32), torch.ones(4).int(), 4
        )
        llm.generate(PROMPTS)
        assert before == [tensor.data_ptr() for tensor in persistent]
        assert tables[0].data_ptr() == pool._tables.data_ptr()
        assert [x.data_ptr() for x in lengths] == [x.data_ptr() for x in pool._lengths]


# vLLM's own Triton kernel divides 0 by 0 in padding rows with this model.
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
@with_states
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_state_space_model_matches_cpu_attention(start, backend, checkpoints_folder):
    """The model has blocks of 96 tokens, which our Triton kernels must support."""
    options = dict(additional_config=settings(), max_model_len=1024, enable_prefix_caching=False)
    prompts = [PROMPTS[0][:200], PROMPTS[2]]
    with engine(make("granite-96", checkpoints_folder), **options) as llm:
        expected = llm.generate(prompts, 4)
    opened, _ = start(backend, model="granite-96", **options)
    with opened as llm:
        free = llm.free_blocks
        assert llm.manager.block_size == 96
        assert llm.generate(prompts, 4) == expected
        assert llm.compressor.compressed == 1
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free
