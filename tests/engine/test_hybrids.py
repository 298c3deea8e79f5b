"""Models some of whose layers see a sliding window: the full ones are compressed, the others stay.

`test_reference` holds what is kept against the methods, gpt-oss's sinks included. Here is what a
second group of layers could break: its blocks are of the same pool, its pages lie in the same
memory, and what it computes behind a compressed prompt follows from what that left.
"""

import json
import math
from dataclasses import replace

import pytest
import torch

from amx_layout import pretend_amx, pretend_no_amx
from checkpoints import HYBRIDS, make, tokens
from engines import BLOCK, V2, engine, first_runner, settings
from processor import needs_avx512
from test_added_pieces import ANSWER as LONG
from test_added_pieces import BOUND, INTERVAL, Added
from test_added_pieces import piecewise as and_bounded
from test_probes import PROBE, Guided
from test_prompts_in_pieces import IN_CHUNKS, piecewise
from test_reference import softmax
from vllm_kvcompress.commands import plan as planning
from vllm_kvcompress.commands.plan_options import PlanOptions
from vllm_kvcompress.engine.compression.tiled_mover import TiledMover
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.planning.layer_groups import layer_groups, layer_types
from vllm_kvcompress.settings.config import CompressionConfig

NAMES = ["gpt-oss"] if V2 else list(HYBRIDS)
NEW = 12
PROMPT = tokens(417, seed=33)


def groups_of(llm):
    text = llm.scheduler.vllm_config.model_config.hf_text_config.to_dict()
    return layer_groups(layer_types(text), text["num_hidden_layers"], text["sliding_window"])


def full_layers(name, seen):
    """The checkpoint's shape as one of compressed layers alone."""
    return replace(HYBRIDS[name], layers=len(seen))


@pytest.mark.parametrize("name", NAMES)
def test_windows_see_their_window_beside_packed_pages(name, checkpoints_folder):
    """In memory that both kinds of layers use, with a pool that just fits: packed in place."""
    blocks = {"gpt-oss": 3, "gemma3": 3 + 3 * 5, "mistral-windows": 6}[name]
    with engine(
        make(name, checkpoints_folder),
        blocks=1 + -(-len(PROMPT) // BLOCK) + 16 + blocks,
        additional_config=settings("cake", 0.5),
        max_num_batched_tokens=64,
        max_num_seqs=2,
        max_model_len=512,
        enable_prefix_caching=False,
    ) as llm:
        types, window = groups_of(llm), HYBRIDS[name].more["sliding_window"]
        assert llm.compressor.packer.num_layers == len(types.full)
        seen, free = llm.record_attention(all_layers=True), llm.free_blocks
        llm.submit("r", PROMPT, 40)
        llm.drain()
        assert llm.free_blocks == free
        assert llm.compressor.compressed == 1
    shape, checked = HYBRIDS[name], 0
    for layer, parts in seen.items():
        if layer in types.full:
            continue
        q, k, v, out = (
            torch.cat(parts[part]).double().flatten(1) for part in ("q", "k", "v", "out")
        )
        q, k, v, out = (x.view(len(q), -1, shape.head_dim) for x in (q, k, v, out))
        for at in range(0, len(q), 3):
            first = max(at - window + 1, 0)
            for head in range(shape.heads):
                kv = head // (shape.heads // shape.kv_heads)
                logits = k[first : at + 1, kv] @ q[at, head] / math.sqrt(shape.head_dim)
                sink = None if parts["sinks"] is None else parts["sinks"][head]
                want = softmax(logits, sink) @ v[first : at + 1, kv]
                bound = 1e-5 * v[first : at + 1, kv].abs().amax() * max(logits.abs().amax(), 1)
                assert (out[at, head] - want).abs().amax() <= bound, (layer, at, head)
                checked += 1
    assert checked > 1000


@first_runner
@pytest.mark.parametrize("name", NAMES)
def test_vllm_groups_the_layers_as_we_count_them(name, checkpoints_folder):
    """Blocks, their bytes, and what a request takes of the windowed groups at most."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    from vllm_kvcompress.engine.layers import other_layers_of
    from vllm_kvcompress.engine.worker.footprint import sizes_of

    with engine(
        make(name, checkpoints_folder),
        additional_config=settings("cake", 0.4),
        max_num_batched_tokens=96,
        max_model_len=1024,
    ) as llm:
        own, config = groups_of(llm), llm.scheduler.vllm_config
        made = llm.scheduler.kv_cache_config
        assert [len(group.layer_names) for group in made.kv_cache_groups].count(len(own.full)) >= 1
        assert len(made.kv_cache_groups) == own.full_groups + own.windowed_groups
        assert made.kv_cache_tensors[0].size == made.num_blocks * sizes_of(config).block_bytes
        managers = llm.scheduler.kv_cache_manager.coordinator.single_type_managers
        windows = [each for each in managers if isinstance(each, SlidingWindowManager)]
        options = PlanOptions(
            model=make(name, checkpoints_folder), everything=json.dumps(FREE["kvcompress"]),
            length=900, output=100, block_size=BLOCK, dtype="float32", longest=1024, requests=4,
            device="cpu",
        )  # fmt: skip
        planned = planning.ask(options).forecast
        assert planned.block_bytes == sizes_of(config).block_bytes
        free = llm.free_blocks
        llm.submit("r", tokens(900, seed=1), 100)
        most, decoding = 0, []
        while llm.llm.llm_engine.has_unfinished_requests():
            llm.step()
            if llm.compressor.compressed:
                decoding.append(free - llm.free_blocks)
            held = [len([b for b in each.req_to_blocks.get(r.request_id, ()) if not b.is_null])
                    for r in llm.running() for each in windows]  # fmt: skip
            most = max(most, sum(held))
        ours = other_layers_of(config).blocks()
        assert ours - len(windows) <= most <= ours
        spare = len(windows)  # a window's first block need not be the one that it begins in
        # in the step that packs, a window still has what its last chunk needed
        assert planned.on.decoding - spare <= decoding[1] <= planned.on.decoding
        assert planned.on.end - spare <= max(decoding[1:]) <= planned.on.end
        assert planned.off.end > 1.5 * planned.on.end


# attention with sinks is added up by each method; what the windows hold is counted by none
PIECEWISE = [("cake", name) for name in NAMES] + [("tova", "gpt-oss"), ("caote", "gpt-oss")]


@pytest.mark.parametrize(("method", "name"), [("cake-chunk", "gpt-oss")] if V2 else PIECEWISE)
def test_every_token_of_a_prompt_in_pieces_reads_what_the_reference_holds(
    method, name, checkpoints_folder
):
    """Only the full layers' tokens are dropped; what the windows hold is none of the budget's."""
    length, answer = 531, 40
    with engine(
        make(name, checkpoints_folder),
        additional_config=piecewise(method, **PROBE),
        **IN_CHUNKS,
    ) as llm:
        seen, free = llm.record_attention(), llm.free_blocks
        # no two tokens of this prompt whose scores float32 cannot tell apart stand at a cut
        llm.submit("r", tokens(length, seed=9), answer)
        llm.drain()
        assert llm.free_blocks == free
    replay = Guided(method, full_layers(name, seen), seen, length, int(length * 0.4))
    replay.to_the_end(length + answer)
    assert len(replay.packed_at) >= 3


@pytest.mark.parametrize("method", ["h2o", "d2o"])
def test_an_answer_that_is_bounded_goes_on_so(method, checkpoints_folder):
    """Attention with sinks is added up from piece to piece and from interval to interval."""
    name, length = "gpt-oss", 480
    config = and_bounded(method, 0.4, decode_budget=BOUND, decode_interval=2 * INTERVAL)
    options = dict(max_num_seqs=4, max_model_len=1024, max_num_batched_tokens=70)
    with engine(make(name, checkpoints_folder), additional_config=config, **options) as llm:
        seen, free = llm.record_attention(), llm.free_blocks
        llm.submit("r", tokens(length, seed=5), LONG)
        llm.drain()
        assert llm.free_blocks == free
    replay = Added(method, full_layers(name, seen), seen, length, int(length * 0.4))
    replay.interval = 2 * INTERVAL
    for position in range(length + LONG - 1):
        replay.step(position)
    assert replay.packed_at


# -- requests side by side ------------------------------------------------------------------------

LENGTHS = (417, 300, 128, 90, 640)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
PROMPTS[1][:250] = PROMPTS[0][:250]
ASKS = [{}, {"kv_compress": "off"}, {"kv_compress": "h2o"}, {"kv_budget": 0.15}]
FREE = settings("cake", 0.4, allow_override="off,cake,h2o")


def answers(llm, order=1):
    every = [(prompt, ask) for prompt in PROMPTS for ask in ASKS]
    return llm.answers(every[::order], NEW)[::order]


@pytest.fixture(scope="module", params=NAMES)
def alone(request, checkpoints_folder):
    """A model, each answer by itself, and how its layers are grouped."""
    model, found = make(request.param, checkpoints_folder), []
    with engine(model, additional_config=FREE, enable_prefix_caching=False) as llm:
        for prompt in PROMPTS:
            found += [llm.generate([prompt], NEW, extra_args=ask)[0] for ask in ASKS]
        assert llm.compressor.compressed == 3 * 4
        return model, found, groups_of(llm)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"max_num_batched_tokens": 64, "max_num_seqs": 8}, id="chunks"),
        pytest.param({"async_scheduling": True}, marks=first_runner, id="async"),
        pytest.param({"enable_prefix_caching": False}, marks=first_runner, id="batch"),
    ],
)
def test_an_answer_depends_on_its_own_tokens(more, alone, keep_async_scheduling):
    """Whoever ran before in the same blocks and left what in the prefix cache, in either order.

    A request that is left whole must find no window's block that was computed behind a compressed
    prompt, and a compressed one no more than its method may take.
    """
    model, want, _ = alone
    with engine(model, additional_config=FREE, max_model_len=1024, **more) as llm:
        free = llm.free_blocks
        for order in (1, -1):
            assert answers(llm, order) == want
        llm.settle()
        assert llm.free_blocks == free


@first_runner
@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_a_hit_ends_where_the_window_begins_though_another_prompt_begins_alike(
    name, checkpoints_folder
):
    """One step computes the place where they part, and that where hits for this prompt end."""
    common = tokens(300, seed=1)
    other, prompt = common + tokens(200, seed=2), common + tokens(300, seed=3)
    model, config = make(name, checkpoints_folder), settings("cake", 0.4)
    with engine(model, additional_config=config, max_model_len=1024) as llm:
        found = [llm.outputs([each], 3)[0].num_cached_tokens for each in (other, prompt, prompt)]
    # of 600 tokens a window of 32 leaves 17 blocks
    assert found == [0, 0, 17 * BLOCK]


def test_a_conversation_is_cached_as_far_as_it_was_computed_whole(alone):
    """A turn holds the last one's answer, which windows saw behind a compressed prompt.

    The answer has more full blocks than any window, or nothing would be found behind it.
    """
    model, *_ = alone
    asks = ({}, {"kv_compress": "off"}, {})
    with engine(model, additional_config=FREE, max_model_len=2048) as llm:
        history, turns = tokens(350, seed=2), []
        for turn in range(3):
            for new, ask in zip((150, NEW, NEW), asks, strict=True):
                output = llm.outputs([history], new, extra_args=ask)[0]
                turns.append((history, ask, list(output.outputs[0].token_ids)))
            assert output.num_cached_tokens > 0
            # a turn asks the same first and last
            assert turns[-1][2] == turns[-3][2][:NEW]
            history = history + turns[-3][2] + tokens(50, seed=turn)
    with engine(
        model, additional_config=FREE, max_model_len=2048, enable_prefix_caching=False
    ) as llm:
        for i, (history, ask, answer) in enumerate(turns):
            llm.submit(str(i), history, len(answer), extra_args=ask)
        want = {key.split("-")[0]: answer for key, answer in llm.drain().items()}
        assert want == {str(i): answer for i, (_, _, answer) in enumerate(turns)}


@first_runner
def test_in_a_pool_of_any_size_it_ends_and_is_the_same(alone):
    """From the smallest that vLLM takes: destinations fit beside the windows' blocks, or in place.

    Counted for the compressed group alone, fresh ones would be promised that the others take.
    """
    model, want, own = alone
    config = CompressionConfig.parse(FREE["kvcompress"])
    used = set()
    plan = page_plan(config.prompt(len(own.full), LENGTHS[0]), BLOCK)
    chunk = 32
    least = 14 + own.windowed_blocks(448, chunk, BLOCK)
    for blocks in range(least, least + plan.blocks + 3, 2):
        with engine(
            model,
            blocks=1 + blocks,
            additional_config=FREE,
            max_model_len=448,
            max_num_batched_tokens=chunk,
            max_num_seqs=2,
        ) as llm:
            places = llm.watch_packing(lambda finished: finished.todo.in_place)
            for _ in range(2):
                assert llm.generate([PROMPTS[0]], NEW) == want[:1]
            used |= set(places)
            assert llm.free_blocks == blocks
    assert used == {True, False}


@first_runner
@pytest.mark.parametrize("name", NAMES)
def test_sequences_longer_than_the_pool(name, checkpoints_folder):
    """What full layers may hold is the pool without what the windows take."""
    from vllm.exceptions import VLLMValidationError

    model, chunk, room, longest = make(name, checkpoints_folder), 64, 17, 2048
    config = settings("cake", 160, window=8, max_whole=256, piece=96, allow_override="off", **PROBE)
    prompts, short = [tokens(1900, seed=1), tokens(1333, seed=2)], tokens(500, seed=3)
    off = {"kv_compress": "off"}
    options = dict(additional_config=config, max_model_len=longest, max_num_batched_tokens=chunk)
    with engine(model, max_num_seqs=2, **options) as llm:
        want = [llm.generate([prompt], 20)[0] for prompt in prompts]
        whole = llm.generate([short], room * BLOCK - len(short) + 1, extra_args=off)
        windows = groups_of(llm).windowed_blocks(longest, chunk, BLOCK)
    with engine(model, blocks=1 + room + windows, max_num_seqs=2, **options) as llm:
        free = llm.free_blocks
        assert llm.generate(prompts, 20) == want
        # its answer ends with the pool
        assert llm.generate([short], longest - len(short), extra_args=off) == whole
        with pytest.raises(VLLMValidationError, match="stand whole; ask for a method"):
            llm.generate(prompts[:1], 20, extra_args=off)
        assert llm.free_blocks == free


@first_runner
def test_preempted_it_goes_on_as_a_prompt_of_the_same_tokens(alone):
    model, _, own = alone
    options = dict(max_model_len=704, max_num_batched_tokens=64, max_num_seqs=8)
    blocks = 22 + own.windowed_blocks(704, 64, BLOCK) + 2
    with engine(model, additional_config=FREE, blocks=1 + blocks, **options) as llm:
        free, cuts = llm.free_blocks, llm.watch_preemptions()
        for i, prompt in enumerate(PROMPTS):
            llm.submit(str(i), prompt, 60)
        done = {key.split("-")[0]: answer for key, answer in llm.drain().items()}
        assert cuts
        assert llm.free_blocks == free
    with engine(model, additional_config=FREE, enable_prefix_caching=False) as llm:
        for i, prompt in enumerate(PROMPTS):
            llm.alone(prompt, 60, done[str(i)], cuts.get(str(i), []))


@needs_avx512
@first_runner
@pytest.mark.parametrize("name", ["gpt-oss"])
def test_tiles_answer_as_vectors(name, checkpoints_folder, monkeypatch):
    """AMX's layout, whose pages are unpacked before they are scored."""
    made = {}
    for kind, pretend in (("vectors", pretend_no_amx), ("tiles", pretend_amx)):
        pretend(monkeypatch)
        model = make(name, checkpoints_folder)
        with engine(model, additional_config=FREE, dtype="bfloat16", max_num_seqs=4) as llm:
            assert isinstance(llm.compressor.packer.mover, TiledMover) == (kind == "tiles")
            made[kind] = answers(llm)
    assert made["tiles"] == made["vectors"]
