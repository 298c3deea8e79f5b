"""Prompts in pieces that are packed in k4v3 without dropping a token.

The pool may be smaller than the prompt. Later chunks attend to quantised tokens, so the outputs are
not those of a prompt that is packed at once; a float64 replay of the attention layers checks them.
"""

import pytest
import torch

from checkpoints import WIDE, make, tokens
from engines import BLOCK, engine, settings
from group_replay import assert_never_written_again, assert_replay_matches, watch_added_groups
from kvcompress_kernels import k4v3
from vllm_kvcompress.engine.scheduling.compression_stats import CompressionStats
from vllm_kvcompress.methods.page_plan import RECENT_TOKENS
from vllm_kvcompress.schedules.pieces import piece_schedule
from vllm_kvcompress.settings.config import CompressionConfig

MODEL = "llama-two-layers-d64"
SHAPE = WIDE[MODEL]
MAX_WHOLE, PIECE, LONGEST = 128, 96, 2048
# float32: 256 tokens in a packed page, the bytes of 32 ordinary ones
PAGE_TOKENS = k4v3.page_tokens(BLOCK, 4)


def group_settings(method="cake", **options):
    defaults = {"packed_dtype": "k4v3", "max_whole": MAX_WHOLE, "piece": PIECE}
    return settings(method, 1.0, **defaults | options)


def group_engine(checkpoints_folder, *, config=None, **options):
    defaults = {"max_num_seqs": 4, "max_model_len": LONGEST, "max_num_batched_tokens": 70}
    return engine(
        make(MODEL, checkpoints_folder),
        additional_config=config or group_settings(),
        **defaults | options,
    )


def schedule_of(length):
    parsed = CompressionConfig.parse(group_settings()["kvcompress"])
    return piece_schedule(parsed, SHAPE.layers, BLOCK, length, page_tokens=PAGE_TOKENS)


def test_every_chunk_and_step_reads_groups_and_ordinary_tokens(checkpoints_folder):
    """Codes and attention against float64, for the prompt, and for an output that is packed too."""
    prompt, count = tokens(1100, seed=5), 300
    config = group_settings(decode_interval=128)
    with group_engine(checkpoints_folder, config=config) as llm:
        seen, pool = llm.record_attention(), llm.compressor.pool
        added = watch_added_groups(llm, seen)
        llm.submit("r", prompt, count)
        while sum(len(part) for part in seen.get(0, {"q": ()})["q"]) < len(prompt) + count - 2:
            llm.step()
        assert_never_written_again(pool, added)
        (slot,) = pool._slots.values()
        assert pool._group_tokens[slot].tolist() == [5 * PAGE_TOKENS] * SHAPE.layers
        # column 0 has the first block, which stays in 16 bits
        pages = pool._packed[slot, :, :6].tolist()
        assert len({page for layer in pages for page in layer}) == 6 * SHAPE.layers
        llm.drain()
    # 256 tokens of prompt and output, from token 1,056 on, fill another page, and 32 follow it
    assert [each.computed for each in added] == [352, 640, 832, 1100, 1344]
    assert [each.end for each in added] == [288, 544, 800, 1056, 1312]
    edges = [edge + offset for edge in (352, 640, 832, 1100, 1344) for offset in (-1, 0)]
    positions = sorted({*range(0, len(prompt) + count - 2, 61), *edges})
    nothing = [torch.zeros(SHAPE.kv_heads, 0, SHAPE.head_dim, dtype=torch.float64)] * 2
    for layer in range(SHAPE.layers):
        assert_replay_matches(SHAPE, seen, added, layer, (0, 0, nothing), positions)


@pytest.fixture
def stats_of_all_steps(monkeypatch):
    """Keep counts in the scheduler, which sends them with each step's statistics."""
    monkeypatch.setattr(CompressionStats, "take", lambda self: None)


@pytest.mark.usefixtures("stats_of_all_steps")
@pytest.mark.parametrize("length", [1500, 770])
def test_a_pool_smaller_than_the_prompt_serves_and_reports_it(checkpoints_folder, length):
    """Blocks held, counts and the report; after 770 tokens nothing is left to pack at the end."""
    prompt, schedule = tokens(length, seed=1), schedule_of(length)
    packed_blocks, held = (length - BLOCK - RECENT_TOKENS) // PAGE_TOKENS, []
    with group_engine(checkpoints_folder, blocks=1 + schedule_of(LONGEST).max_blocks) as llm:
        free, stats = llm.free_blocks, llm.scheduler.step_builder.stats
        assert free < length // BLOCK
        llm.submit("r", prompt, 6)
        while llm.scheduler.requests or not held:
            llm.step()
            held.append(free - llm.free_blocks)
        unpacked = length + 4 - BLOCK - packed_blocks * PAGE_TOKENS
        assert held[-2] == 1 + packed_blocks - (-unpacked // BLOCK)
        assert max(held) <= schedule.max_blocks
        assert llm.compressor.compressed == 1
        assert stats.planned == {"cake": 1}
        # a page each at 352, 640, 832, 1120 and 1408, and none at the end
        assert stats.packed_pieces == 1 + sum(end < length for end in (352, 640, 832, 1120, 1408))
        # the first page goes to a fresh block, each further one into one of the prompt's own
        assert (stats.packed_blocks, stats.in_place) == (1, 0)
        assert stats.freed_blocks == packed_blocks * (PAGE_TOKENS // BLOCK - 1) + 1
        assert stats.packed == {"cake": 1}
        assert (stats.prompt_tokens, stats.kept_tokens) == (length, length)
        assert set(stats.layer_tokens.values()) == {length}
        assert stats.seconds[0] > 0


LENGTHS = (900, 150, 600, 90, 1033)
PROMPTS = [tokens(length, seed=60 + length) for length in LENGTHS]
# a common prefix that is longer than the first packing
PROMPTS[2][:400] = PROMPTS[0][:400]
OUTPUT_TOKENS = 30


@pytest.fixture(scope="module")
def solo_outputs(checkpoints_folder):
    """Return the output of each prompt alone, in steps without a limit."""
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": LONGEST}
    with group_engine(checkpoints_folder, **options) as llm:
        return [llm.generate([prompt], OUTPUT_TOKENS)[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 37}, id="chunks"),
        pytest.param({"async_scheduling": True}, id="async"),
        pytest.param({"blocks": 18}, id="small pool"),
    ],
)
def test_outputs_depend_on_the_own_prompt_only(
    options, solo_outputs, checkpoints_folder, async_scheduling_allowed
):
    """Not on the batch, chunks, prefix-cache hits, the pool's size, preemptions or scheduling."""
    with group_engine(checkpoints_folder, **options) as llm:
        free, cuts = llm.free_blocks, llm.watch_preemptions()
        for index, prompt in enumerate(PROMPTS):
            llm.submit(str(index), prompt, OUTPUT_TOKENS)
        outputs = llm.drain()
        llm.finish_in_flight_steps()
        # after a preemption, the output so far is part of the prompt
        cut = [(PROMPTS[int(name)], outputs[name], cuts[name], None) for name in cuts]
        llm.assert_match_solo_runs(cut, OUTPUT_TOKENS, at_once=1)
        for name in outputs.keys() - cuts.keys():
            assert outputs[name] == solo_outputs[int(name)]
        assert bool(cuts) == ("blocks" in options)
        if not cuts:
            # in the second run, prompts hit the prefix cache
            assert llm.generate(PROMPTS[::-1], OUTPUT_TOKENS)[::-1] == solo_outputs
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free


def test_a_preempted_prompt_starts_over(checkpoints_folder, solo_outputs):
    """Between any two packings, and with blocks that held groups used by others in between."""
    prompt = PROMPTS[0]
    with group_engine(checkpoints_folder, max_num_batched_tokens=96) as llm:
        free = llm.free_blocks
        for cut in (2, 4, 5, 8, 9):
            llm.submit("r", prompt, OUTPUT_TOKENS)
            for _ in range(cut):
                llm.step()
            assert llm.scheduler.reset_prefix_cache(reset_running_requests=True)
            assert llm.free_blocks == free
            assert list(llm.drain().values()) == [solo_outputs[0]]
        assert llm.free_blocks == free


def test_prefix_cache_hits_end_at_the_first_packing(checkpoints_folder, solo_outputs):
    """Later tokens were computed from quantised ones; an uncompressed prompt may not read them."""
    config = group_settings(allow_override="off")
    with group_engine(checkpoints_folder, config=config) as llm:
        hits, output_ids = [], []
        for extra_args in ({}, {}, {"kv_compress": "off"}, {}):
            (output,) = llm.outputs([PROMPTS[0]], OUTPUT_TOKENS, extra_args=extra_args)
            hits.append(output.num_cached_tokens)
            output_ids.append(list(output.outputs[0].token_ids))
        # The first block and a page are packed after token 352. Up to there, all tokens were
        # computed from unquantised ones, and a chunk has filled the block of 32 tokens behind.
        assert hits == [0, 288, 320, 288]
        assert [output_ids[index] for index in (0, 1, 3)] == [solo_outputs[0]] * 3
        assert llm.scheduler.reset_prefix_cache()
        alone = llm.generate([PROMPTS[0]], OUTPUT_TOKENS, extra_args={"kv_compress": "off"})
        assert output_ids[2] == alone[0]


@pytest.mark.parametrize("interval", [None, 128])
def test_an_output_ends_when_the_pool_is_full(checkpoints_folder, interval):
    """With an interval, the pool holds a longer output."""
    config = group_settings(**{} if interval is None else {"decode_interval": interval})
    length, blocks = 1000, 1 + schedule_of(LONGEST - 1).max_blocks
    with group_engine(checkpoints_folder, config=config, blocks=blocks) as llm:
        free = llm.free_blocks
        assert free == blocks - 1
        (output,) = llm.outputs([tokens(length, seed=4)], LONGEST - length)
        assert output.outputs[0].finish_reason == "length"
        packed, first_unpacked = 3, 25  # 768 tokens behind the first block
        fitting = (free - packed - 1 + first_unpacked) * BLOCK - length + 1
        num_tokens = len(output.outputs[0].token_ids)
        if interval is None:
            assert num_tokens == fitting
        else:
            assert num_tokens == LONGEST - length > fitting
        assert llm.free_blocks == free


def test_an_output_that_outgrew_the_pool_resumes_in_pieces(checkpoints_folder):
    """Its short prompt stayed uncompressed, but prompt and output no longer fit without packing."""
    config = group_settings(decode_interval=128)
    blocks, prompt, count = 1 + schedule_of(LONGEST - 1).max_blocks, tokens(30, seed=6), 1200
    with group_engine(checkpoints_folder, config=config, blocks=blocks) as llm:
        free, cuts = llm.free_blocks, llm.watch_preemptions()
        llm.submit("r", prompt, count)
        while not llm.running() or llm.running()[0].num_computed_tokens < 900:
            llm.step()
        assert free * BLOCK < 900
        assert llm.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert [len(output) for output in llm.drain().values()] == [count]
        assert len(cuts["r"]) == 1
        assert llm.free_blocks == free
