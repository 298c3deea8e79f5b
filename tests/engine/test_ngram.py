"""Drafts out of the prompt: greedy answers are those without drafts, at the same budget.

A draft lies in the tail, and what is taken back is written over. Two things could go wrong without
a word: a prompt that is one token short of computed gets rows for drafts behind its last one,
which are not the prompt's; and blocks for drafts are not the prompt's either.
"""

import pytest
import torch

from checkpoints import make, tokens
from engines import BLOCK, V2, engine, first_runner, settings, v2_drafts
from vllm_kvcompress.planning.schedules import LookAhead

# of vLLM's own drafters: V1's warns by its compiler, and V2 has none in 0.31
pytestmark = [
    pytest.mark.filterwarnings("ignore:(?s).*reflected list"),
    pytest.mark.skipif(V2 and not v2_drafts(), reason="this vLLM's Model Runner V2 does not draft"),
]
DRAFTS = 3
NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": DRAFTS,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
}
NEW = 40 if not V2 else 12
SHORT = 20 if not V2 else 8
# two of them leave their tail's first block within `SHORT` tokens
LENGTHS = (417, 640, 90, 321, 145)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
PROMPTS[3][:200] = PROMPTS[0][:200]
# what is judged by a window's queries, by the last one, by all of them, and by none
METHODS = ["off", "cake", "tova", "h2o", "d2o", "streamingllm"]
WAYS = {
    "prefix cache": {},
    "no cache": {"enable_prefix_caching": False},
    "chunks": {"max_num_batched_tokens": 64, "max_num_seqs": 8},
    "preempted": {"blocks": 1 + 40},
}
if V2:  # which is interpreted
    METHODS = ["cake", "tova"]
    WAYS = {name: WAYS[name] for name in ("prefix cache", "chunks")}
FREE = settings("cake", 0.4, allow_override="all")
FEW = {"allowed_token_ids": [5, 9, 200, 311]}


@pytest.fixture(scope="module", autouse=True)
def drafter():
    """Model Runner V2's is a Triton kernel."""
    if V2:
        import interpreter

        interpreter.mend()


def watch_drafts(llm):
    """From now on: drafts that were judged, and how many of them were taken."""
    counts = {"judged": 0, "taken": 0}
    make_stats = llm.scheduler.make_spec_decoding_stats

    def counting(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs):
        counts["judged"] += num_draft_tokens
        counts["taken"] += num_accepted_tokens
        return make_stats(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    llm.scheduler.make_spec_decoding_stats = counting
    return counts


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make("llama-gqa", checkpoints_folder)


@pytest.fixture(scope="module")
def without(model):
    """What each prompt answers by itself with each method, without drafts.

    Out of four tokens, or hardly a draft would be taken.
    """
    with engine(model, additional_config=FREE, enable_prefix_caching=False) as llm:
        return {
            method: [
                llm.generate([prompt], SHORT, extra_args={"kv_compress": method}, **FEW)[0]
                for prompt in PROMPTS
            ]
            for method in METHODS
        }


@pytest.mark.parametrize("more", WAYS.values(), ids=WAYS)
def test_greedy_is_greedy_without_drafts(more, model, without):
    with engine(model, additional_config=FREE, max_model_len=1024, **NGRAM, **more) as llm:
        free, drafts, preempted = llm.free_blocks, watch_drafts(llm), 0
        for method, answers in without.items():
            asked = {"kv_compress": method}
            for order in (1, -1):
                prompts = PROMPTS[::order]
                cuts = llm.watch_preemptions() if "blocks" in more else {}
                got = llm.generate(prompts, SHORT, extra_args=asked, **FEW)[::order]
                preempted += len(cuts)
                if not cuts:
                    assert got == answers, method
        llm.settle()
        assert llm.free_blocks == free
        assert llm.compressor.compressed >= 2 * 4 * len(without.keys() - {"off"})
        assert bool(preempted) == ("blocks" in more)
        # some were taken and some were not
        assert 0 < drafts["taken"] < drafts["judged"]


@pytest.mark.parametrize("method", ["tova", "cake"] if V2 else ["tova", "cake", "streamingllm"])
def test_trap_09_a_prompt_that_ends_with_rows_for_drafts(method, model):
    """One token is left of a prompt whose others are cached: vLLM fills the step up with drafts."""
    length = 12 * BLOCK + 1
    prompt = tokens(length, seed=3)
    config = settings(method, 0.4, allow_override=f"off,{method}")
    busy = tokens(60, seed=4)
    with engine(model, additional_config=config, enable_prefix_caching=False) as llm:
        want = llm.generate([prompt], NEW)[0]
    with engine(model, additional_config=config, max_model_len=1024, **NGRAM) as llm:
        llm.generate([prompt], 2, extra_args={"kv_compress": "off"})
        rows = watch_rows(llm)
        llm.submit("busy", busy, 30)
        for _ in range(6):
            llm.step()
        llm.submit("r", prompt, NEW)
        done = {key.split("-")[0]: answer for key, answer in llm.drain().items()}
        assert done["r"] == want
        if method != "cake":  # which computes its window
            assert rows["r"][0] == 1 + DRAFTS
        assert llm.compressor.compressed == 1


def test_a_look_ahead_ends_as_without_drafts(model):
    """By the same queries, after the same token, and what is computed from then on is the same.

    Answers out of four tokens, or hardly a draft would be taken.
    """
    ahead, new, prompts = (6, 16, PROMPTS[:4:3]) if V2 else (15, NEW, [*PROMPTS[:1], *PROMPTS[2:4]])
    config = settings("cake", 0.4, allow_override="all", lookahead=ahead)
    methods = ["cake"] if V2 else ["cake", "tova"]
    asks = [{"extra_args": {"kv_compress": method}, **FEW} for method in methods]
    with engine(model, additional_config=config, enable_prefix_caching=False) as llm:
        want = [[llm.generate([prompt], new, **ask)[0] for prompt in prompts] for ask in asks]
    options = dict(additional_config=config, max_model_len=1024)
    with engine(model, **options, **NGRAM, **WAYS["chunks"]) as llm:
        free, packed = llm.free_blocks, llm.watch_packing(lambda done: done.pack_request.answered)
        drafts = watch_drafts(llm)
        for ask, answers in zip(asks, want, strict=True):
            for order in (1, -1):
                assert llm.generate(prompts[::order], new, **ask)[::order] == answers
        llm.settle()
        assert llm.free_blocks == free
        assert set(packed) == {ahead}
        assert len(packed) == len(methods) * 2 * sum(len(prompt) >= 128 for prompt in prompts)
        assert 0.05 < drafts["taken"] / drafts["judged"] < 0.95


def watch_rows(llm):
    """From now on: by request, how many rows each of its steps had."""
    rows: dict[str, list[int]] = {}
    schedule = llm.scheduler.schedule

    def scheduling(*args, **kwargs):
        output = schedule(*args, **kwargs)
        for name, count in output.num_scheduled_tokens.items():
            rows.setdefault(name.split("-")[0], []).append(count)
        return output

    llm.scheduler.schedule = scheduling
    return rows


@first_runner
@pytest.mark.parametrize("blocks", [25, 26, 27])
def test_a_block_for_drafts_is_none_of_the_prompts(blocks, model):
    """In a pool that just fits, beside a request that reads the same blocks.

    None of them may be packed into, so fresh ones are counted. The rows for drafts fill a block
    behind the prompt: were it counted as the prompt's own, one fresh block would be missing.
    """
    prompt, many = tokens(12 * BLOCK + 1, seed=6), 40
    config = settings("tova", 0.9, allow_override="off,tova")
    drafts = {"speculative_config": {**NGRAM["speculative_config"], "num_speculative_tokens": many}}
    with engine(model, additional_config=config, enable_prefix_caching=False) as llm:
        want = llm.generate([prompt], NEW)[0]
    options = dict(additional_config=config, max_model_len=16 * BLOCK, max_num_seqs=2)
    with engine(model, blocks=1 + blocks, **options, **drafts) as llm:
        rows = watch_rows(llm)
        llm.submit("other", prompt, 20, extra_args={"kv_compress": "off"})
        for _ in range(4):
            llm.step()
        llm.submit("r", prompt, NEW)
        done = {key.split("-")[0]: answer for key, answer in llm.drain().items()}
        assert done["r"] == want
        assert rows["r"][0] in (1, 1 + many)
        assert llm.compressor.compressed == 1
        assert llm.free_blocks == blocks


@first_runner
def test_blocks_are_those_without_drafts_and_those_of_the_drafts(model):
    """While it decodes: at most one block more than its tokens take."""
    prompt, held = tokens(640, seed=7), {}
    for name, more in (("without", {}), ("with", NGRAM)):
        with engine(model, additional_config=settings("cake", 0.2), **more) as llm:
            free, held[name] = llm.free_blocks, {}
            llm.submit("r", prompt, 70)
            llm.step()
            while llm.running():
                computed = llm.running()[0].num_computed_tokens
                held[name].setdefault(computed, free - llm.free_blocks)
                llm.step()
    shared = held["with"].keys() & held["without"].keys()
    assert len(shared) > 10
    for computed in shared:
        assert 0 <= held["with"][computed] - held["without"][computed] <= 1


@first_runner
def test_a_look_ahead_has_what_was_taken(model, monkeypatch):
    """Packed in a step with drafts, it is judged by the tokens before these.

    Drafts that were not taken lie in the ring behind them, and must not lie on them.
    """
    known, new = 20, 39
    config, prompt = settings("snapkv", 0.4, lookahead=40, window=32), PROMPTS[0]
    with engine(model, enable_prefix_caching=False, additional_config=config) as llm:
        seen = llm.record_attention()
        llm.generate([prompt], new, **FEW)
    every = torch.stack([torch.cat(seen[layer]["q"]) for layer in range(len(seen))])

    def early(ahead, footprint, computed):
        return ahead.kept(footprint, computed) if ahead.answered(computed) >= known else None

    monkeypatch.setattr(LookAhead, "plan", early)
    with engine(model, additional_config=config, max_model_len=1024, **NGRAM) as llm:
        rows, ring, found = watch_rows(llm), llm.compressor.pool.ring, []
        latest = ring.latest
        ring.latest = lambda *asked: (found.append((asked, latest(*asked))), found[-1][1])[1]
        packed = llm.watch_packing(lambda done: (done.pack_request.tokens, len(rows["r"])))
        llm.submit("r", prompt, new, **FEW)
        llm.drain()
    (((_, (computed,), count), queries),) = found
    ((tokens_then, step),) = packed
    assert (tokens_then, count) == (computed, 32)
    assert rows["r"][step - 1] > 1
    own = every[:, computed - 32 : computed].flatten(2)
    assert torch.allclose(queries.flatten(2), own, rtol=1e-3, atol=1e-3)
