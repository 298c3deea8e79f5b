"""Drafts of a draft model and the scheduler: only verified tokens are packed.

With async scheduling, a step is scheduled before the outputs of the step before it are known, and
vLLM counts the drafts in flight as output. If a draft counted as a look-ahead's token and were
rejected later, the next token would be written to a freed block.
"""

import pytest
import torch

from checkpoints import make, tokens
from draft_checkpoints import make_eagle
from drafting import (
    FOUR_TOKENS,
    ForcedDrafts,
    pack_early,
    speculative,
    watch_draft_attention,
    watch_drafts,
)
from engines import BLOCK, engine, model_runner_v1_only, settings
from vllm_kvcompress.engine.messages.step import BUDGET, HALF

pytestmark = model_runner_v1_only
NEW, DRAFTS, WINDOW = 48, 4, 32
FEW = {"allowed_token_ids": list(FOUR_TOKENS)}
SIZES = {"max_model_len": 1024, "max_num_seqs": 8, "enable_prefix_caching": False}
# Prompts that end before, at and behind the end of a block.
PROMPTS = {str(length): tokens(length, seed=length) for length in (381, 384, 385, 386)}


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make("llama-two-layers", checkpoints_folder)


def submit_all(llm):
    for name, prompt in PROMPTS.items():
        llm.submit(name, prompt, NEW, **FEW)


def watch_waits(llm) -> list[str]:
    """Record the requests of later steps that wait for their outputs, once per step."""
    waits, reserve = [], llm.scheduler._reserve_prefill_lookahead

    def reserving(request, num_computed_tokens, num_new_tokens):
        tokens = reserve(request, num_computed_tokens, num_new_tokens)
        if not tokens and num_new_tokens:
            waits.append(request.request_id.split("-")[0])
        return tokens

    llm.scheduler._reserve_prefill_lookahead = reserving
    return waits


WRONG = {
    "all accepted": lambda position: False,
    "all rejected": lambda position: True,
    "first of a block": lambda position: position % BLOCK == 0,
    "last of a block": lambda position: position % BLOCK == BLOCK - 1,
    "every third": lambda position: position % 3 == 0,
}


def texts_without_drafts(model, config):
    """Return each prompt with its output without drafts."""
    with engine(model, additional_config=config, **SIZES) as llm:
        submit_all(llm)
        outputs = llm.drain()
        return {name: prompt + outputs[name] for name, prompt in PROMPTS.items()}


@pytest.mark.parametrize(
    ("lookahead", "is_async"),
    [*((tokens, True) for tokens in (*range(9), None)), (0, False), (4, False), (None, False)],
)
def test_look_aheads_end_with_verified_tokens(lookahead, is_async, model, async_scheduling_allowed):
    """Whatever drafts are rejected, outputs equal those without drafts; None is the default."""
    more = {} if lookahead is None else {"lookahead": lookahead}
    config = {
        "kvcompress": {
            "compress": "cake-chunk" if lookahead != 1 else "snapkv",
            "budget": 0.3,
            "min_prompt": 128,
            **more,
        }
    }
    texts = texts_without_drafts(model, config)
    head = speculative(make_eagle(model), DRAFTS)
    options = SIZES | head | {"async_scheduling": is_async}
    with engine(model, additional_config=config, **options) as llm:
        free, drafts, waits = llm.free_blocks, watch_drafts(llm), watch_waits(llm)
        forced = ForcedDrafts(llm, texts, WRONG["all accepted"])
        packed = llm.watch_packing(lambda done: done.pack_request.output_tokens)
        for name, forced.is_wrong in WRONG.items():
            submit_all(llm)
            outputs = llm.drain()
            assert {key: PROMPTS[key] + output for key, output in outputs.items()} == texts, name
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free
        due = llm.scheduler.admissions.settings.resolved_lookahead
        assert packed == [due or None] * len(WRONG) * len(PROMPTS)
        assert 0.3 < drafts.accepted / drafts.verified < 0.9
        assert bool(waits) == (is_async and due > 2)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_early_compression_keeps_verified_tokens_only(is_async, model, async_scheduling_allowed):
    """Prompts are packed to half, and later to the budget, after steps with drafts.

    The reference is packed to half after the same numbers of tokens, without drafts. Later, the
    last tokens before the tail must be kept, and drafts would be behind it.
    """
    config = settings("snapkv", 0.2, lookahead=40, window=WINDOW)
    texts = texts_without_drafts(model, config)
    head = speculative(make_eagle(model), DRAFTS)
    options = SIZES | head | {"async_scheduling": is_async}
    with engine(model, additional_config=config, **options) as llm:
        free, drafts = llm.free_blocks, watch_drafts(llm)
        ForcedDrafts(llm, texts, WRONG["every third"])
        packings = pack_early(llm, {HALF: 4, BUDGET: 9})
        errors = watch_draft_attention(llm)
        submit_all(llm)
        llm.drain()
        assert len(errors) > sum(map(len, PROMPTS.values()))
        assert max(errors) < 1e-4
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free
        assert drafts.accepted > 0
    assert len(packings) == 2 * len(PROMPTS)
    with engine(model, additional_config=config, **SIZES) as llm:
        when = {key: len_of(done) for key, done in packings.items()}
        reference = pack_early(llm, when)
        submit_all(llm)
        llm.drain()
    for name in PROMPTS:
        half, budget = packings[name, HALF], packings[name, BUDGET]
        assert torch.equal(half.kept, reference[name, HALF].kept)
        first_block = half.pack_request.tokens // BLOCK
        held = half.counts * BLOCK + budget.pack_request.tokens - first_block * BLOCK
        tail = budget.pack_request.tokens % BLOCK
        for layer, length in enumerate(held.tolist()):
            expected = set(range(length - WINDOW, length - tail))
            for kept in budget.kept[layer].tolist():
                assert expected <= set(kept)
                assert max(kept) < length - tail


def len_of(done) -> int:
    """Return the output tokens of a packing."""
    return done.pack_request.output_tokens
