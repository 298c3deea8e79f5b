"""Drafts out of the prompt: greedy answers are those without drafts, at the same budget.

A draft lies in the tail, and what is taken back is written over. Two things could go wrong without
a word: a prompt that is one token short of computed gets rows for drafts behind its last one,
which are not the prompt's; and blocks for drafts are not the prompt's either.
"""

import pytest

from checkpoints import make, tokens
from engines import BLOCK, V2, engine, first_runner, settings, v2_drafts

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
LENGTHS = (417, 640, 90, 321, 128)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
PROMPTS[3][:200] = PROMPTS[0][:200]
METHODS = ["off", "cake", "tova", "h2o", "d2o", "streamingllm", "cake-chunk", "caote"]
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
    """What each prompt answers by itself with each method, without drafts."""
    with engine(model, additional_config=FREE, enable_prefix_caching=False) as llm:
        return {
            method: [
                llm.generate([prompt], NEW, extra_args={"kv_compress": method})[0]
                for prompt in PROMPTS
            ]
            for method in METHODS
        }


@pytest.mark.parametrize("more", WAYS.values(), ids=WAYS)
def test_greedy_is_greedy_without_drafts(more, model, without):
    with engine(model, additional_config=FREE, max_model_len=1024, **NGRAM, **more) as llm:
        free, drafts = llm.free_blocks, watch_drafts(llm)
        for method, answers in without.items():
            asked = {"kv_compress": method}
            for order in (1, -1):
                prompts = PROMPTS[::order]
                cuts = llm.watch_preemptions() if "blocks" in more else {}
                got = llm.generate(prompts, NEW, extra_args=asked)[::order]
                if not cuts:
                    assert got == answers, method
        llm.settle()
        assert llm.free_blocks == free
        assert llm.compressor.compressed >= 2 * 4 * len(without.keys() - {"off"})
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
