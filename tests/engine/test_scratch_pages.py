"""Prefills behind packed pages read dequantised copies in scratch pages (`ScratchPages`).

The engines use scratch pages on any processor (`reads_copies`).
"""

import pytest
import torch

import cuda_on_cpu
from checkpoints import make, tokens
from engines import BLOCK, engine, settings
from kvcompress_kernels import k4v3
from test_reuse import MODEL, assert_adopted_replay_matches, generate, reuse_engine
from vllm_kvcompress.engine.pages.scratch_pages import MIN_QUERIES
from vllm_kvcompress.engine.worker.cpu import CompressingCPUWorker

LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "LHBNC", "BHLNC")
PAGE = k4v3.page_tokens(BLOCK, 4)
PACKED = 1024
HELD = BLOCK + PACKED  # behind the first block, which stays ordinary


class Watch:
    """Records which rows read copies, and for each batch whether its layers must run in Python.

    Args:
        llm: the engine.
    """

    def __init__(self, llm):
        self.rows, self.in_python = [], []
        pool = llm.compressor.pool
        use, tables = pool.use_scratch, pool.tables

        def using(slots, queries, max_tokens):
            read_slots, copies = use(slots, queries, max_tokens)
            for slot, read_slot, count in zip(slots, read_slots, queries, strict=False):
                if slot != read_slot:
                    self.rows.append((pool._equal_group_tokens[slot], count))
            return read_slots, copies

        def counting(*args):
            self.in_python.append(llm.compressor.must_run_layers_in_python)
            return tables(*args)

        pool.use_scratch, pool.tables = using, counting


@pytest.fixture(scope="module", autouse=True)
def copies_on_any_processor():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompressingCPUWorker, "reads_copies", True)
        yield


@pytest.fixture(scope="module")
def llm(checkpoints_folder, copies_on_any_processor):
    """Return an engine that all tests share; a test finds prompts of others in its prefix cache."""
    with reuse_engine(checkpoints_folder) as opened:
        yield opened


@pytest.fixture
def watch(llm):
    pool = llm.compressor.pool
    before = pool.use_scratch, pool.tables, pool.scratch.pages
    yield Watch(llm)
    pool.use_scratch, pool.tables, pool.scratch.pages = before


@pytest.fixture
def seen(llm):
    """Return what `record_attention` records during the test."""
    context = llm.worker.vllm_config.compilation_config.static_forward_context
    yield llm.record_attention()
    for layer in context.values():
        vars(getattr(layer, "impl", layer)).pop("forward", None)


def test_chunks_behind_adopted_pages_read_copies_and_equal_cold_runs(llm, watch):
    base = tokens(1100, seed=31)
    generate(llm, base, 2)
    watch.rows.clear()
    watch.in_python.clear()
    prompt = base[:HELD] + tokens(700, seed=32)
    warm, cached = generate(llm, prompt, 20)
    assert cached == HELD
    assert watch.rows == [(PACKED, 512), (PACKED + 512, 188)]
    assert watch.in_python[:2] == [True, True], "a replayed graph would not fill scratch pages"
    assert generate(llm, prompt, 20, "cold") == (warm, 0)


def test_few_queries_and_decode_steps_use_no_copies(llm, watch):
    base = tokens(HELD + MIN_QUERIES, seed=33)
    generate(llm, base, 2)
    watch.rows.clear()
    watch.in_python.clear()
    _, cached = generate(llm, base[:-1], 30)
    assert cached == HELD
    assert watch.rows == []
    assert len(watch.in_python) >= 30
    assert not any(watch.in_python), "a FULL CUDA graph may be replayed"


def test_attention_over_copies_matches_float64(llm, watch, seen):
    add_groups = llm.compressor.pool.add_groups
    assert_adopted_replay_matches(llm, seen, tokens(1100, seed=34), HELD, 35)
    llm.compressor.pool.add_groups = add_groups
    assert len(watch.rows) >= 2


def test_attention_over_copies_equals_attention_over_groups(checkpoints_folder):
    prompt, outputs = tokens(1100, seed=36), []
    with reuse_engine(checkpoints_folder, model="qwen3") as llm:
        watch, seen = Watch(llm), llm.record_attention()
        scratch = llm.compressor.pool.scratch
        for salt, pages in (("copies", scratch.pages), ("groups", scratch.pages[:0])):
            scratch.pages = pages
            for parts in seen.values():
                for name in ("q", "k", "v", "out"):
                    parts[name].clear()
            generate(llm, prompt, 2, salt)
            outputs.append({layer: parts["out"][1] for layer, parts in seen.items()})
    assert watch.rows == [(512, 512), (PACKED, 1100 - HELD)], (
        "the run without scratch pages used some"
    )
    for layer, copies in outputs[0].items():
        groups = outputs[1][layer]
        assert len(copies) == 512
        # The inputs of later layers differ by the rounding of earlier ones.
        assert (copies - groups).abs().max() <= 1e-4 * groups.abs().max()
    assert not torch.equal(outputs[0][0], outputs[1][0])


@pytest.mark.parametrize("fitting", [0, 1, 2])
def test_rows_without_scratch_pages_still_equal_cold_runs(llm, watch, fitting):
    scratch = llm.compressor.pool.scratch
    scratch.pages = scratch.pages[: fitting * (PACKED // BLOCK)]
    base = tokens(1100, seed=37)
    generate(llm, base, 2)
    free = llm.free_blocks
    prompts = [base[:HELD] + tokens(150 + n, seed=10 * fitting + n) for n in range(2)]
    llm.submit("decoding", base[:700], 40)
    for _ in range(4):
        llm.step()
    watch.rows.clear()
    for n, prompt in enumerate(prompts):
        llm.submit(str(n), prompt, 12)
    outputs = llm.drain()
    assert [tokens for tokens, _ in watch.rows] == [PACKED] * fitting
    assert llm.free_blocks == free
    for n, prompt in enumerate(prompts):
        assert generate(llm, prompt, 12, f"cold {fitting} {n}") == (outputs[str(n)], 0)
    assert generate(llm, base[:700], 40, f"cold {fitting}") == (outputs["decoding"], 0)


def test_vllm_does_not_know_the_scratch_blocks(llm, watch):
    pool = llm.compressor.pool
    blocks = llm.pool.num_gpu_blocks
    assert llm.worker.vllm_config.cache_config.num_gpu_blocks == blocks
    own = pool.flat_ids_in_all_layers(torch.arange(blocks)).flatten()
    assert not set(own.tolist()) & set(pool.scratch.pages.tolist())
    assert len(pool.scratch.pages) * BLOCK >= 4096
    assert len(pool.scratch.pages.unique()) == len(pool.scratch.pages)
    assert llm.llm.reset_prefix_cache()


def test_settings_without_prefills_behind_packed_pages_have_no_scratch_pages(checkpoints_folder):
    config = settings("cake", 1.0, packed_dtype="k4v3")
    with engine(make(MODEL, checkpoints_folder), additional_config=config) as llm:
        pool = llm.compressor.pool
        assert pool.scratch is None
        assert pool._num_blocks == llm.pool.num_gpu_blocks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flash_attention_reads_copies_in_every_layout(layout, monkeypatch, checkpoints_folder):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    cuda_on_cpu.use(monkeypatch, "FLASH_ATTN")
    with reuse_engine(checkpoints_folder) as llm:
        watch, prompt = Watch(llm), tokens(1250, seed=38)
        base, cached = generate(llm, prompt[:1100], 2)
        assert watch.rows == [(512, 512), (PACKED, 1100 - HELD)]
        warm, cached = generate(llm, prompt, 20)
        assert cached == HELD + BLOCK, "a 16-bit block behind the packed pages"
        assert watch.rows[2:] == [(PACKED, 1250 - HELD - BLOCK)]
        assert generate(llm, prompt, 20, "cold") == (warm, 0)
        llm.compressor.pool.scratch.pages = llm.compressor.pool.scratch.pages[:0]
        assert generate(llm, prompt, 20, "groups") == (warm, 0)
        assert generate(llm, prompt[:1100], 2, "groups 2") == (base, 0)
        assert llm.llm.reset_prefix_cache()
