"""Packed pages in the prefix cache (--kv-reuse): on a grid, warm requests equal cold ones.

A cold run of the same prompt has a salt of its own, so it finds nothing in the prefix cache.
"""

import random

import pytest
import torch
from vllm import SamplingParams
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

from checkpoints import WIDE, make, tokens, write_adapter
from engines import BLOCK, V2, engine, settings
from group_replay import assert_replay_matches, watch_added_groups
from kvcompress_kernels import k4v3
from test_soak import Request, run_requests
from vllm_kvcompress.engine.scheduling import packed_prefixes
from vllm_kvcompress.engine.scheduling.compression_stats import CompressionStats

MODEL = "llama-two-layers-d64"
SHAPE = WIDE[MODEL]
PAGE = k4v3.page_tokens(BLOCK, 4)
PAGES = packed_prefixes._PAGES
CELL = 512
EVENTS = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}


def reuse_settings(**options):
    config = settings("cake", 1.0, packed_dtype="k4v3", **{"reuse": "grid"} | options)
    del config["kvcompress"]["min_prompt"]
    return config


def reuse_engine(folder, model=MODEL, **options):
    defaults = {
        "max_num_seqs": 4,
        "max_model_len": 4096,
        "max_num_batched_tokens": 700,
        "additional_config": reuse_settings(),
    }
    return engine(make(model, folder), **defaults | options)


def generate(llm, prompt, count, salt=None, lora_request=None, **params):
    """Return the output tokens of a prompt, and how many of its tokens were cached."""
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **params)
    given = {"prompt_token_ids": list(prompt)} | ({"cache_salt": salt} if salt else {})
    (output,) = llm.llm.generate([given], sampling, lora_request=lora_request, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def generate_cold(llm, requests):
    """Return the outputs of requests (prompt, token count, params), which find nothing cached."""
    given, sampling = [], []
    for number, (prompt, count, params) in enumerate(requests):
        given.append({"prompt_token_ids": list(prompt), "cache_salt": f"cold {number}"})
        sampling.append(SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **params))
    outputs = llm.llm.generate(given, sampling, use_tqdm=False)
    assert not any(output.num_cached_tokens for output in outputs)
    return [list(output.outputs[0].token_ids) for output in outputs]


def packed(tokens):
    """Return the tokens of the first block and of the whole cells behind it."""
    return BLOCK + (tokens - BLOCK) // CELL * CELL


def hit(tokens):
    """Return the tokens of the longest hit in a request with so many computed tokens."""
    assert tokens >= BLOCK + CELL
    return tokens // BLOCK * BLOCK


def conversation(llm, seed, turns, count):
    """Return prompt, output and cached tokens of each turn; a prompt has all turns before it."""
    history, record = tokens(900, seed=seed), []
    for turn in range(turns):
        output, cached = generate(llm, history, count)
        record.append((list(history), output, cached))
        history = history + output + tokens(70, seed=100 * seed + turn)
    return record


def assert_equal_cold(llm, record):
    """Assert that each output equals that of a cold run."""
    cold = generate_cold(llm, [(prompt, len(output), {}) for prompt, output, _ in record])
    assert cold == [output for _, output, _ in record]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_later_turns_find_prompt_and_output_and_equal_cold_runs(
    asynchronous, checkpoints_folder, async_scheduling_allowed
):
    with reuse_engine(checkpoints_folder, async_scheduling=asynchronous) as llm:
        free = llm.free_blocks
        # the first output fills the second cell; in Triton's interpreter, steps are slow
        record = conversation(llm, 1, 3, 40 if V2 else 170)
        ends = [len(prompt) + len(output) for prompt, output, _ in record]
        assert [cached for *_, cached in record] == [
            0, *(hit(end - 1) for end in ends[:2])
        ]  # fmt: skip
        assert_equal_cold(llm, record)
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free


@pytest.fixture(scope="module")
def shared(checkpoints_folder):
    """An engine whose requests may choose other settings, with its KV cache events."""
    config = reuse_settings(allow_override="all", usage=True)
    with reuse_engine(checkpoints_folder, additional_config=config, **EVENTS) as llm:
        yield llm, Router(llm)


@pytest.fixture
def quiet(shared, monkeypatch):
    """The shared engine; after the test, it holds no block, and its router's index is right."""
    monkeypatch.setattr(CompressionStats, "take", lambda self: None)
    llm, router = shared
    free = llm.free_blocks
    yield llm
    llm.finish_in_flight_steps()
    assert llm.free_blocks == free
    router.check()


class Router:
    """Rebuilds the index of cached blocks from an engine's events, as a KV-aware router does."""

    def __init__(self, llm):
        self.llm, self.index, self.chains = llm, set(), []
        llm.scheduler.kv_event_publisher.publish = self.receive
        add_request = llm.scheduler.add_request

        def adding(request):
            self.chains.append(request.block_hashes)
            add_request(request)

        llm.scheduler.add_request = adding

    def receive(self, batch):
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.index.clear()
            elif isinstance(event, BlockRemoved):
                self.index.difference_update(event.block_hashes)
            else:
                assert isinstance(event, BlockStored)
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                self.index.update(event.block_hashes)

    def check(self):
        """Assert that the index has the ordinary blocks, and those of all packed pages."""
        llm, ratio = self.llm, PAGE // BLOCK
        held, pages = set(), {}
        for chain in self.chains:
            for last in range(ratio, len(chain), ratio):
                pages[chain[last]] = chain[last - ratio + 1 : last + 1]
        for key in llm.pool.cached_block_hash_to_block._cache:
            group, block_hash = get_group_id(key), get_block_hash(key)
            held.update(pages[block_hash] if group == PAGES else [block_hash])
        assert self.index == {maybe_convert_block_hash(block_hash) for block_hash in held}


def test_concurrent_requests_share_packed_blocks_and_branches_diverge(quiet):
    llm, base = quiet, tokens(1600, seed=5)
    generate(llm, base, 2)
    prompts = [base[:1200] + tokens(100 + index, seed=index) for index in range(3)]
    for index, prompt in enumerate(prompts):
        llm.submit(str(index), prompt, 20)
    for _ in range(3):
        llm.step()
    common = CELL * 2 // PAGE
    held = [llm.packed_blocks(request.request_id)[:common] for request in llm.running()]
    ids = [[block.block_id for block in blocks] for blocks in held]
    assert len(ids) == 3
    assert ids[0] == ids[1] == ids[2]
    assert {block.ref_cnt for block in held[0]} == {3}
    outputs = llm.drain()
    for name, output in outputs.items():
        prompt = prompts[int(name)]
        assert generate(llm, prompt, 20, f"cold {name}") == (output, 0)


def test_requests_that_share_unpacked_blocks_pack_them_into_blocks_of_their_own(quiet):
    """Both complete a cell whose first blocks they found in the cache."""
    llm, base, count = quiet, tokens(1000, seed=61), 400
    output, _ = generate(llm, base, 200)
    following = base + output + tokens(3, seed=62)
    first = packed(len(base + output)) // BLOCK
    for name in ("a", "b"):
        llm.submit(name, following, count)
    while [request.num_output_tokens > 0 for request in llm.running()] != [True, True]:
        llm.step()
    held = [llm.manager.req_to_blocks[request.request_id] for request in llm.running()]
    assert first * BLOCK < hit(len(base + output) - 1)
    assert held[0][first] is held[1][first]
    assert packed(len(following) + count - 1) > first * BLOCK
    outputs = [*llm.drain().values()]
    assert outputs[0] == outputs[1]
    assert generate(llm, following, count, "cold") == (outputs[0], 0)


def test_packing_leaves_ordinary_blocks_that_another_request_holds_in_the_cache(quiet):
    llm, prompt, off, done = quiet, tokens(1100, seed=63), {"kv_compress": "off"}, {}
    llm.submit("holds", prompt, 40, extra_args=off)
    while not llm.running() or not llm.running()[0].num_output_tokens:
        llm.step()
    for name, options in (("packs", {}), ("finds", off)):
        llm.submit(name, prompt, 2, extra_args=options)
        while name not in done:
            done |= llm.step()
    assert "holds" not in done
    assert done["finds"].num_cached_tokens == hit(1099)
    llm.drain()


def test_a_preempted_request_resumes_from_its_own_pages(quiet):
    llm, prompt, stats = quiet, tokens(1100, seed=9), quiet.scheduler.step_builder.stats
    before = stats.packed_hit_tokens
    llm.submit("cut", prompt, 40)
    while not llm.running() or llm.running()[0].num_output_tokens < 10:
        llm.step()
    llm.preempt(llm.running()[0])
    (resumed,) = llm.drain().values()
    assert stats.packed_hit_tokens - before == packed(1100)
    assert generate(llm, prompt, 40, "cold") == (resumed, 0)


def test_requests_that_end_before_their_first_step_leave_nothing(quiet):
    """They wait for a place in the batch, or found pages in a step that had no blocks for them."""
    llm, prompt = quiet, tokens(1100, seed=71)
    generate(llm, prompt, 2)
    for index in range(6):
        llm.submit(f"r{index}", prompt + tokens(20, seed=index), 30)
    llm.llm.llm_engine.abort_request(["r5"])
    llm.step()
    taken = llm.pool.get_new_blocks(llm.free_blocks - 2)
    llm.step()
    llm.llm.llm_engine.abort_request(["r3", "r4"])
    llm.pool.free_blocks(taken)
    outputs = llm.drain()
    assert len(outputs) == 3
    for name, output in outputs.items():
        alone = generate(llm, prompt + tokens(20, seed=int(name[1])), 30, f"cold {name}")
        assert alone == (output, 0)


def test_a_chat_that_begins_with_a_short_prompt_is_packed_as_it_grows(quiet):
    """Also by its output alone, and by a request for a single token."""
    llm, prompt = quiet, tokens(90, seed=31)
    output, cached = generate(llm, prompt, 700)
    assert cached == 0
    following = prompt + output + tokens(40, seed=32)
    held = hit(len(prompt + output) - 1)
    assert generate(llm, following, 30)[1] == held
    assert generate(llm, following, 30, "cold") == (generate(llm, following, 30)[0], 0)
    document = tokens(1700, seed=33)
    assert generate(llm, document, 1)[1] == 0
    assert generate(llm, document, 1)[1] == hit(1699)


def test_other_budgets_and_salts_never_read_packed_pages_and_a_reset_drops_them(quiet):
    llm, prompt = quiet, tokens(1300, seed=3)
    held = hit(1299)
    first, cached = generate(llm, prompt, 5)
    assert cached == 0
    assert generate(llm, prompt, 5) == (first, held)
    assert generate(llm, prompt, 5, "a") == (first, 0)
    stats = llm.scheduler.step_builder.stats
    packed_hits = stats.packed_hit_tokens
    for name, options in {
        "budget": {"kv_budget": 0.5},
        "off": {"kv_compress": "off"},
        "auto": {"kv_packed_dtype": "auto", "kv_budget": 0.5},
    }.items():
        # it finds ordinary blocks alone
        warm, _ = generate(llm, prompt, 5, extra_args=options)
        assert stats.packed_hit_tokens == packed_hits
        assert generate(llm, prompt, 5, name, extra_args=options) == (warm, 0)
    assert generate(llm, prompt, 5) == (first, held)
    llm.finish_in_flight_steps()
    assert llm.llm.reset_prefix_cache()
    assert generate(llm, prompt, 5) == (first, 0)


def test_a_reset_with_running_requests_recomputes_them_cold(quiet):
    """As a server does for `/pause` with a cleared cache, after which weights may differ."""
    llm, prompts = quiet, [tokens(1100, seed=91), tokens(700, seed=92)]
    generate(llm, prompts[0], 2)
    before = llm.scheduler.step_builder.stats.packed_hit_tokens
    for index, prompt in enumerate(prompts):
        llm.submit(str(index), prompt, 60)
    while min([request.num_output_tokens for request in llm.running()] or [0]) < 20:
        llm.step()
    adopted = llm.scheduler.step_builder.stats.packed_hit_tokens
    assert adopted - before == packed(1099)
    assert llm.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    outputs = llm.drain()
    assert llm.scheduler.step_builder.stats.packed_hit_tokens == adopted
    for name, output in outputs.items():
        assert generate(llm, prompts[int(name)], 60, f"cold {name}") == (output, 0)


def test_several_samples_and_prompt_logprobs_equal_cold_runs(quiet):
    llm, prompt = quiet, tokens(1100, seed=93)
    generate(llm, prompt, 2)

    def samples(salt=None):
        sampling = SamplingParams(n=3, temperature=1, seed=7, max_tokens=60, ignore_eos=True)
        given = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        (output,) = llm.llm.generate([given], sampling, use_tqdm=False)
        return [list(sample.token_ids) for sample in output.outputs], output.num_cached_tokens

    warm, cached = samples()
    assert samples("cold")[0] == warm
    assert len({tuple(sample) for sample in warm}) == 3
    assert cached == hit(1099)

    # vLLM computes such a prompt in full: cached tokens have no logits
    sampling = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    (output,) = llm.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    assert not output.num_cached_tokens
    assert len(output.prompt_logprobs) == len(prompt)


def test_a_thrashing_pool_evicts_zeroes_and_still_equals_cold_runs(checkpoints_folder):
    """Pages are evicted from the end of a chat, and the events tell a router so."""
    seeds, record, zeroed = range(11, 20), [], 0
    with reuse_engine(checkpoints_folder, blocks=41, max_model_len=40 * BLOCK, **EVENTS) as llm:
        free, router = llm.free_blocks, Router(llm)
        history = {seed: tokens(900, seed=seed) for seed in seeds}
        zero = llm.compressor.pool.zero

        def counting(blocks):
            nonlocal zeroed
            zeroed += len(blocks)
            zero(blocks)

        llm.compressor.pool.zero = counting
        for turn in range(2):
            for seed in seeds if turn % 2 else reversed(seeds):
                output, cached = generate(llm, history[seed], 40)
                record.append((list(history[seed]), output, cached))
                history[seed] = history[seed] + output + tokens(70, seed=100 * seed + turn)
                router.check()
        assert llm.free_blocks == free
        hits = [cached for *_, cached in record]
        assert any(hits)
        assert not all(hits[len(seeds) :])
        assert zeroed
        assert_equal_cold(llm, record[:1])
        assert llm.free_blocks == free
        router.check()
    with reuse_engine(checkpoints_folder) as llm:
        assert_equal_cold(llm, record)


def random_turns(rng, count):
    """Return turns of six chats, in a random order, with random settings, priorities and aborts.

    A prompt has a random part of the chat so far, so chats branch, and a random end.
    """
    overrides = [None, None, None, {"kv_compress": "off"}, {"kv_budget": 0.3}]
    overrides.append({"kv_budget": 0.3, "kv_packed_dtype": "auto"})
    chats = [tokens(1150, seed=300 + number) for number in range(6)]
    return [
        Request(
            prompt=rng.choice(chats)[: rng.randint(1, 1150)] + tokens(rng.randint(1, 60), index),
            num_output=rng.randint(1, 90),
            wait=rng.randint(0, 12),
            abort=rng.randint(1, 12) if rng.random() < 0.2 else None,
            priority=rng.randint(0, 3),
            override=rng.choice(overrides),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(
    "options",
    [{"async_scheduling": True}, {"scheduling_policy": "priority"}],
    ids=["async", "priority"],
)
def test_random_turns_in_a_small_pool_lose_no_block_and_equal_cold_runs(
    options, checkpoints_folder, async_scheduling_allowed, monkeypatch
):
    monkeypatch.setattr(CompressionStats, "take", lambda self: None)
    config = reuse_settings(allow_override="all")
    turns = random_turns(random.Random(5), 48)
    with reuse_engine(
        checkpoints_folder,
        additional_config=config,
        blocks=60,
        max_model_len=59 * BLOCK,
        **options,
        **EVENTS,
    ) as llm:
        free, router, preemptions = llm.free_blocks, Router(llm), llm.watch_preemptions()
        outputs, aborted = run_requests(llm, turns)
        assert llm.free_blocks == free
        assert not llm.scheduler.states
        router.check()
        assert llm.scheduler.step_builder.stats.packed_hit_tokens > 0
        assert preemptions, "no request was preempted: the pool is too large"
        assert aborted
    # What a preempted request keeps at a budget below 1.0 depends on its output so far.
    compared = [
        (turn, outputs[str(index)])
        for index, turn in enumerate(turns)
        if str(index) in outputs and turn.override in (None, {"kv_compress": "off"})
    ]
    assert len(compared) > 15
    requests = [
        (turn.prompt, turn.num_output, {"extra_args": turn.override}) for turn, _ in compared
    ]
    with reuse_engine(checkpoints_folder, additional_config=config, max_num_seqs=16) as llm:
        assert generate_cold(llm, requests) == [output for _, output in compared]


def test_tails_are_evicted_before_any_page(checkpoints_folder):
    """As many chats stay warm as without cached tails. While blocks are free, tails stay too."""
    first = [tokens(1000, seed=80 + index) for index in range(8)]
    pages = (1000 - BLOCK) // CELL * CELL // PAGE
    # for the first blocks and the pages of all chats, and for one more request
    blocks = 1 + len(first) * (1 + pages) + 1000 // BLOCK + 1
    with reuse_engine(checkpoints_folder, blocks=blocks, max_model_len=1100, **EVENTS) as llm:
        router = Router(llm)
        for prompt in first:
            generate(llm, prompt, 1)
        assert generate(llm, first[-1], 1)[1] == hit(999)
        assert [generate(llm, prompt, 1)[1] >= packed(1000) for prompt in first] == [True] * 8
        router.check()


def test_late_packing_keeps_a_cold_prompt_exact_and_later_turns_warm(
    checkpoints_folder, monkeypatch
):
    monkeypatch.setattr(CompressionStats, "take", lambda self: None)
    config = reuse_settings(reuse="late", allow_override="off")
    with reuse_engine(checkpoints_folder, additional_config=config) as llm:
        free, prompt = llm.free_blocks, tokens(900, seed=41)
        stats = llm.scheduler.step_builder.stats
        first, cached = generate(llm, prompt, 300)
        exact, _ = generate(llm, prompt, 300, "exact", extra_args={"kv_compress": "off"})
        assert (first[0], cached) == (exact[0], 0)
        following = prompt + first + tokens(70, seed=42)
        assert generate(llm, following, 1)[1] == hit(len(prompt) + 300 - 1)
        # the first turn has packed its prompt in whole pages, and the second one the rest
        whole = BLOCK + (len(prompt) - BLOCK) // PAGE * PAGE
        assert stats.packed_hit_tokens == whole
        assert generate(llm, following, 1)[1] == hit(len(following) - 1)
        assert stats.packed_hit_tokens == whole + BLOCK + (len(following) - BLOCK) // PAGE * PAGE
        # An uncompressed request caches ordinary blocks behind the pages and their tail. They keep
        # their keys when a compressed request that has found them ends.
        longer = following + tokens(2 * BLOCK, seed=43)
        generate(llm, longer, 1, extra_args={"kv_compress": "off"})
        for _ in range(2):
            assert generate(llm, longer + tokens(5, seed=44), 1)[1] == hit(len(longer))
        assert llm.free_blocks == free


def assert_adopted_replay_matches(llm, seen, base, held, seed):
    """Replay a request that adopts `held` tokens of `base`, computed here, in float64.

    Args:
        seen: what `record_attention` returned.
        seed: seed of the tokens behind the adopted ones.
    """
    generate(llm, base, 4)
    # The first block stays in 16 bits, and its tokens are the first that the engine computes.
    leading = {
        layer: [
            parts[name][0][:BLOCK].view(BLOCK, SHAPE.kv_heads, SHAPE.head_dim).transpose(0, 1)
            for name in ("k", "v")
        ]
        for layer, parts in seen.items()
    }
    for parts in seen.values():
        for name in ("q", "k", "v", "out"):
            parts[name].clear()
    added = watch_added_groups(llm, seen)
    _, cached = generate(llm, base[:held] + tokens(700, seed=seed), 300)
    assert cached == held
    adoption, *later = added
    later = [each._replace(end=each.end - held) for each in later]
    computed = sum(len(part) for part in seen[0]["q"])
    edges = [each.computed + offset for each in later for offset in (-1, 0)]
    positions = sorted({*range(0, computed, 61), *edges, computed - 1})
    for layer in range(SHAPE.layers):
        groups = k4v3.Group(*(part[layer] for part in adoption.groups))
        flat = [
            torch.cat([first.double(), part.transpose(0, 1).flatten(1, 3)[:, : held - BLOCK]], 1)
            for first, part in zip(
                leading[layer], k4v3.dequantise(groups, torch.float64), strict=True
            )
        ]
        assert_replay_matches(SHAPE, seen, later, layer, (0, 0, flat), positions, leading=0)


def test_attention_behind_adopted_pages_matches_float64(checkpoints_folder):
    with reuse_engine(checkpoints_folder, max_num_batched_tokens=70) as llm:
        base, held = tokens(1100, seed=21), packed(1099)
        seen = llm.record_attention()
        assert_adopted_replay_matches(llm, seen, base, held, 22)


def test_adapters_do_not_share_pages(checkpoints_folder, tmp_path):
    from vllm.lora.request import LoRARequest

    folder = write_adapter(tmp_path, layers=SHAPE.layers, hidden=SHAPE.heads * SHAPE.head_dim)
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    with reuse_engine(checkpoints_folder, **options) as llm:
        prompt, adapter = tokens(1300, seed=51), LoRARequest("slow", 1, folder)
        held = hit(1299)
        plain = generate(llm, prompt, 8)
        adapted = generate(llm, prompt, 8, lora_request=adapter)
        assert (plain[1], adapted[1]) == (0, 0)
        assert plain[0] != adapted[0]
        assert generate(llm, prompt, 8) == (plain[0], held)
        assert generate(llm, prompt, 8, lora_request=adapter) == (adapted[0], held)
