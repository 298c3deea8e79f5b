"""When an answer is packed again, and what it may hold: from lengths alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.spans import count_before
from vllm_kvcompress.planning.kv_footprint import KVFootprint
from vllm_kvcompress.planning.schedules import EveryInterval
from vllm_kvcompress.settings.config import CompressionConfig

prop = settings(derandomize=True, deadline=None, max_examples=150)


def config(**more):
    return CompressionConfig.parse({"compress": "snapkv", "min_prompt": 1, **more})


@st.composite
def answers(draw):
    """A request whose prefill has ended, and the tokens of its prompt and its answer."""
    block = draw(st.sampled_from([1, 4, 16]))
    interval = block * draw(st.integers(1, 6))
    window = draw(st.integers(1, min(interval, 8)))
    layers, prompt = draw(st.integers(1, 5)), draw(st.integers(1, 30 * block))
    made = config(
        window=window,
        decode_budget=draw(st.integers(window + 1, 25 * block + window + 1)),
        decode_interval=interval,
        decode_window=window,
        budget=draw(st.floats(0.05, 1.0)),
    )
    last = prompt + draw(st.integers(1, 60 * block))
    protected = draw(st.sampled_from([0, 1, prompt // 3, prompt // 2]))
    spans = ((0, protected),) if protected else ()
    answer = EveryInterval(settings=made, prefilled=prompt, last=last, spans=spans)
    footprint = KVFootprint(num_layers=layers, block_size=block)
    plan = made.page_plan(layers, prompt, block, spans)
    if plan is not None:
        footprint.pack(plan, prompt // block)
    return answer, footprint, 0 if plan is None else plan.blocks


@prop
@given(answers())
def test_what_is_held_stays_within_its_bound(case):
    """From the first time on; pages are exact, and a layer's bound on the host holds."""
    answer, footprint, packed = case
    size, layers, frozen = footprint.block_size, footprint.num_layers, None
    interval, window = answer.settings.decode_interval, answer.settings.resolved_decode_window
    for tokens in range(answer.prefilled + 1, answer.last):
        held = packed + -(-tokens // size) - footprint.first_block
        if footprint.frozen:
            assert held <= -(-answer.cap(footprint) // layers) + interval // size + 1
        plan = answer.plan(footprint, tokens)
        if plan is None:
            continue
        before = footprint.pages + layers * (tokens // size - footprint.first_block)
        assert tokens % size == 0
        assert tokens - footprint.first_block * size >= interval
        assert tokens + 1 < answer.last
        assert plan.pages < before
        always_kept = window + count_before(answer.spans, answer.prefilled)
        assert plan.floor_pages == max(-(-always_kept // size), 1)
        assert layers * plan.floor_pages <= plan.pages
        assert -(-before // layers) <= plan.full_blocks
        assert plan.tail == 0
        if frozen is not None:
            assert plan.pages == frozen
        packed, frozen = plan.blocks, plan.pages
        footprint.pack(plan, tokens // size, freeze=True)
        assert footprint.most_pages * layers >= footprint.pages


@prop
@given(answers())
def test_the_most_that_is_held(case):
    answer, footprint, packed = case
    most = answer.most_blocks(footprint, packed=packed, tokens=answer.last - 1)
    size, own, seen = footprint.block_size, packed, []
    for tokens in range(answer.prefilled, answer.last):
        seen.append(own + -(-tokens // size) - footprint.first_block)
        plan = answer.plan(footprint, tokens) if tokens > answer.prefilled else None
        if plan is not None:
            own = plan.blocks
            footprint.pack(plan, tokens // size, freeze=True)
    assert most == max(seen)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"decode_interval": 64},
            "--kv-decode-interval needs --kv-decode-budget; set it, or remove",
        ),
        ({"decode_window": 4}, "decode_window needs --kv-decode-budget; set it, or remove"),
        (
            {"decode_budget": 8},
            "decode_budget=8 tokens per layer cannot hold the decode window of 8 tokens",
        ),
        ({"decode_budget": 0}, "decode_budget"),
        ({"decode_budget": 12.5}, "decode_budget must be a whole number of tokens, got 12.5"),
        ({"decode_budget": True}, "decode_budget must be a whole number of tokens, got True"),
        ({"decode_budget": 64, "decode_window": 0}, "decode_window must be at least 1"),
        (
            {"decode_budget": 64, "decode_window": 1, "compress": "cake"},
            "decode_window must be at least 2",
        ),
        ({"decode_budget": 64, "decode_interval": 4}, "at most decode_interval=4, got 8"),
    ],
)
def test_settings_that_mean_nothing(given, words):
    with pytest.raises(ConfigError) as refused:
        config(**given)
    assert words in str(refused.value)


def test_windows_that_judge_an_answer():
    for name, window in {"tova": 1, "streamingllm": 0, "cake": 8, "cake-chunk": 8}.items():
        assert config(compress=name, decode_budget=64).resolved_decode_window == window
    assert config(decode_budget=64, decode_window=20).resolved_decode_window == 20
