"""N-gram speculative decoding: greedy outputs equal those without drafts at the same budget.

Draft tokens are written to the tail, and rejected ones are overwritten. Two errors would be silent:
in the step that computes a prompt's last token, the rows of draft tokens must not be treated as
prompt tokens, and blocks of draft tokens must not be treated as prompt blocks.
"""

import pytest
import torch

from checkpoints import make, tokens
from engines import BLOCK, V2, engine, model_runner_v1_only, settings, v2_drafts
from vllm_kvcompress.schedules.lookahead import LookaheadSchedule

# V1's drafter compiles with numba, which warns; V2 has no drafter in vLLM 0.31
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
FEW_TOKENS = 20 if not V2 else 8
# with two of these lengths, `FEW_TOKENS` output tokens fill the tail's first block
LENGTHS = (417, 640, 90, 321, 145)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
PROMPTS[3][:200] = PROMPTS[0][:200]
# methods scored by a window's queries, by the last query, by all queries, and by none
METHODS = ["off", "cake", "tova", "h2o", "d2o", "streamingllm"]
OPTIONS = {
    "prefix cache": {},
    "no cache": {"enable_prefix_caching": False},
    "chunks": {"max_num_batched_tokens": 64, "max_num_seqs": 8},
    "preempted": {"blocks": 1 + 40},
}
if V2:  # slow in Triton's interpreter
    METHODS = ["cake", "tova"]
    OPTIONS = {name: OPTIONS[name] for name in ("prefix cache", "chunks")}
ORDERS = (-1,) if V2 else (1, -1)
ANY_METHOD = settings("cake", 0.4, allow_override="all")
FOUR_TOKENS = {"allowed_token_ids": [5, 9, 200, 311]}


@pytest.fixture(scope="module", autouse=True)
def drafter():
    """Prepare Triton's interpreter for Model Runner V2's drafter, which is a Triton kernel."""
    if V2:
        import interpreter

        interpreter.install_fixes()


def watch_drafts(llm):
    """Count draft tokens that are verified, and accepted, in later steps."""
    counts = {"verified": 0, "accepted": 0}
    make_stats = llm.scheduler.make_spec_decoding_stats

    def counting(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs):
        counts["verified"] += num_draft_tokens
        counts["accepted"] += num_accepted_tokens
        return make_stats(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    llm.scheduler.make_spec_decoding_stats = counting
    return counts


@pytest.fixture(scope="module")
def outputs_without_drafts(model):
    """Return each prompt's output by method, without drafts.

    Sampling is limited to four token ids, because otherwise few drafts would be accepted.
    """
    with engine(model, additional_config=ANY_METHOD, enable_prefix_caching=False) as llm:
        return {
            method: llm.generate(
                PROMPTS, FEW_TOKENS, extra_args={"kv_compress": method}, **FOUR_TOKENS
            )
            for method in METHODS
        }


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_greedy_outputs_match_those_without_drafts(options, model, outputs_without_drafts):
    with engine(model, additional_config=ANY_METHOD, max_model_len=1024, **NGRAM, **options) as llm:
        free, drafts, preempted = llm.free_blocks, watch_drafts(llm), 0
        for method, expected in outputs_without_drafts.items():
            extra_args = {"kv_compress": method}
            for order in ORDERS:
                prompts = PROMPTS[::order]
                cuts = llm.watch_preemptions() if "blocks" in options else {}
                outputs = llm.generate(prompts, FEW_TOKENS, extra_args=extra_args, **FOUR_TOKENS)[
                    ::order
                ]
                preempted += len(cuts)
                if not cuts:
                    assert outputs == expected, method
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free
        assert llm.compressor.compressed >= len(ORDERS) * 4 * len(
            outputs_without_drafts.keys() - {"off"}
        )
        assert bool(preempted) == ("blocks" in options)
        # some drafts were accepted and some were rejected
        assert 0 < drafts["accepted"] < drafts["verified"]


@pytest.mark.parametrize("method", ["tova", "cake"] if V2 else ["tova", "cake", "streamingllm"])
def test_trap_09_the_last_prompt_token_is_scheduled_with_drafts(method, model):
    """All but a prompt's last token are cached, so vLLM schedules that token with drafts."""
    length = 12 * BLOCK + 1
    prompt = tokens(length, seed=3)
    config = settings(method, 0.4, allow_override=f"off,{method}")
    busy = tokens(60, seed=4)
    with engine(model, additional_config=config, enable_prefix_caching=False) as llm:
        expected = llm.generate([prompt], NEW)[0]
    with engine(model, additional_config=config, max_model_len=1024, **NGRAM) as llm:
        llm.generate([prompt], 2, extra_args={"kv_compress": "off"})
        scheduled = watch_scheduled_tokens(llm)
        llm.submit("busy", busy, 30)
        for _ in range(6):
            llm.step()
        llm.submit("r", prompt, NEW)
        outputs = llm.drain()
        assert outputs["r"] == expected
        if method != "cake":  # CAKE computes all queries of its window
            assert scheduled["r"][0] == 1 + DRAFTS
        assert llm.compressor.compressed == 1


def test_drafts_do_not_change_a_look_ahead(model):
    """Drafts change neither the step nor the queries of compression after a look-ahead.

    Sampling is limited to four token ids, because otherwise few drafts would be accepted.
    """
    lookahead, new, prompts = (
        (6, 16, PROMPTS[:4:3]) if V2 else (15, NEW, [*PROMPTS[:1], *PROMPTS[2:4]])
    )
    config = settings("cake", 0.4, allow_override="all", lookahead=lookahead)
    methods = ["cake"] if V2 else ["cake", "tova"]
    params_by_method = [
        {"extra_args": {"kv_compress": method}, **FOUR_TOKENS} for method in methods
    ]
    with engine(model, additional_config=config, enable_prefix_caching=False) as llm:
        expected_by_method = [llm.generate(prompts, new, **params) for params in params_by_method]
    options = dict(additional_config=config, max_model_len=1024)
    with engine(model, **options, **NGRAM, **OPTIONS["chunks"]) as llm:
        free, packed = (
            llm.free_blocks,
            llm.watch_packing(lambda outputs: outputs.pack_request.output_tokens),
        )
        drafts = watch_drafts(llm)
        for params, expected in zip(params_by_method, expected_by_method, strict=True):
            for order in (1, -1):
                assert llm.generate(prompts[::order], new, **params)[::order] == expected
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free
        assert set(packed) == {lookahead}
        assert len(packed) == len(methods) * 2 * sum(len(prompt) >= 128 for prompt in prompts)
        assert 0.05 < drafts["accepted"] / drafts["verified"] < 0.95


@model_runner_v1_only
@pytest.mark.parametrize("budget", [0.4, 1.0])
def test_drafts_do_not_change_outputs_over_packed_pages(budget, checkpoints_folder):
    """Several queries of a request attend to groups in k4v3 and to the tokens behind them."""
    model = make("llama-two-layers-d64", checkpoints_folder)
    config = settings("snapkv", budget, packed_dtype="k4v3")
    options = {"additional_config": config, "max_model_len": 1024, "max_num_seqs": 4}
    with engine(model, **options) as llm:
        expected = llm.generate(PROMPTS[:4:3], NEW, **FOUR_TOKENS)
    for num_drafts in (2, 4, 8):
        drafts = {**NGRAM["speculative_config"], "num_speculative_tokens": num_drafts}
        with engine(model, **options, speculative_config=drafts) as llm:
            counts = watch_drafts(llm)
            assert llm.generate(PROMPTS[:4:3], NEW, **FOUR_TOKENS) == expected, num_drafts
            assert llm.compressor.compressed == 2
            assert 0 < counts["accepted"] < counts["verified"]


def watch_scheduled_tokens(llm):
    """Record the number of scheduled tokens in each later step, by request."""
    scheduled: dict[str, list[int]] = {}
    schedule = llm.scheduler.schedule

    def scheduling(*args, **kwargs):
        output = schedule(*args, **kwargs)
        for name, count in output.num_scheduled_tokens.items():
            scheduled.setdefault(name.split("-")[0], []).append(count)
        return output

    llm.scheduler.schedule = scheduling
    return scheduled


@model_runner_v1_only
@pytest.mark.parametrize("blocks", [25, 26, 27])
def test_draft_blocks_are_not_counted_as_prompt_blocks(blocks, model):
    """The pool just fits a request that shares all prompt blocks with a concurrent request.

    Shared blocks must not be overwritten, so packing needs free blocks. Draft tokens fill a block
    behind the prompt. If the scheduler counted it as a prompt block, a free block would be missing.
    """
    prompt, num_drafts = tokens(12 * BLOCK + 1, seed=6), 40
    config = settings("tova", 0.9, allow_override="off,tova")
    drafts = {
        "speculative_config": {**NGRAM["speculative_config"], "num_speculative_tokens": num_drafts}
    }
    with engine(model, additional_config=config, enable_prefix_caching=False) as llm:
        expected = llm.generate([prompt], NEW)[0]
    options = dict(additional_config=config, max_model_len=16 * BLOCK, max_num_seqs=2)
    with engine(model, blocks=1 + blocks, **options, **drafts) as llm:
        scheduled = watch_scheduled_tokens(llm)
        llm.submit("other", prompt, 20, extra_args={"kv_compress": "off"})
        for _ in range(4):
            llm.step()
        llm.submit("r", prompt, NEW)
        outputs = llm.drain()
        assert outputs["r"] == expected
        assert scheduled["r"][0] in (1, 1 + num_drafts)
        assert llm.compressor.compressed == 1
        assert llm.free_blocks == blocks


@model_runner_v1_only
def test_drafts_take_at_most_one_more_block(model):
    """During decoding, drafts take at most one block more."""
    prompt, used_blocks = tokens(640, seed=7), {}
    for name, options in (("without", {}), ("with", NGRAM)):
        with engine(model, additional_config=settings("cake", 0.2), **options) as llm:
            free, used_blocks[name] = llm.free_blocks, {}
            llm.submit("r", prompt, 70)
            llm.step()
            while llm.running():
                computed = llm.running()[0].num_computed_tokens
                used_blocks[name].setdefault(computed, free - llm.free_blocks)
                llm.step()
    shared = used_blocks["with"].keys() & used_blocks["without"].keys()
    assert len(shared) > 10
    for computed in shared:
        assert 0 <= used_blocks["with"][computed] - used_blocks["without"][computed] <= 1


@model_runner_v1_only
def test_a_look_ahead_is_scored_by_accepted_tokens_only(model, monkeypatch):
    """A prompt packed in a step with drafts is scored by the accepted tokens only.

    The ring must keep rejected drafts behind the accepted tokens and not overwrite them.
    """
    min_output_tokens, new = 20, 39
    config, prompt = settings("snapkv", 0.4, lookahead=40, window=32), PROMPTS[0]
    with engine(model, enable_prefix_caching=False, additional_config=config) as llm:
        recorded = llm.record_attention()
        llm.generate([prompt], new, **FOUR_TOKENS)
    all_queries = torch.stack([torch.cat(recorded[layer]["q"]) for layer in range(len(recorded))])

    def early(schedule, footprint, computed):
        return (
            schedule.plan_at(footprint, computed)
            if schedule.output_tokens(computed) >= min_output_tokens
            else None
        )

    monkeypatch.setattr(LookaheadSchedule, "plan", early)
    with engine(model, additional_config=config, max_model_len=1024, **NGRAM) as llm:
        scheduled, ring, calls = watch_scheduled_tokens(llm), llm.compressor.pool.ring, []
        indices = ring.indices

        def recording_indices(*where):
            found = indices(*where)
            calls.append((where, ring.gather(found)))
            return found

        ring.indices = recording_indices
        packed = llm.watch_packing(
            lambda outputs: (outputs.pack_request.tokens, len(scheduled["r"]))
        )
        llm.submit("r", prompt, new, **FOUR_TOKENS)
        llm.drain()
    (((_, (computed,), count), queries),) = calls
    ((tokens_then, step),) = packed
    assert (tokens_then, count) == (computed, 32)
    assert scheduled["r"][step - 1] > 1
    expected_queries = all_queries[:, computed - 32 : computed].flatten(2)
    assert torch.allclose(queries.flatten(2), expected_queries, rtol=1e-3, atol=1e-3)
