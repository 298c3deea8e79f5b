"""When an answer is packed again, and what it may hold: from lengths alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvcompress.errors import ConfigError, OverrideError
from vllm_kvcompress.methods.spans import count_before
from vllm_kvcompress.planning.holding import Holding
from vllm_kvcompress.planning.schedules import EveryInterval
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import settings_for

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
    holding = Holding(num_layers=layers, block_size=block)
    plan = made.page_plan(layers, prompt, block, spans)
    if plan is not None:
        holding.pack(plan, prompt // block)
    return answer, holding, 0 if plan is None else plan.blocks


@prop
@given(answers())
def test_what_is_held_stays_within_its_bound(case):
    """From the first time on; pages are exact, and a layer's bound on the host holds."""
    answer, holding, packed = case
    size, layers, frozen = holding.block_size, holding.num_layers, None
    interval, window = answer.settings.decode_interval, answer.settings.resolved_decode_window
    for tokens in range(answer.prefilled + 1, answer.last):
        held = packed + -(-tokens // size) - holding.first_block
        if holding.frozen:
            assert held <= -(-answer.cap(holding) // layers) + interval // size + 1
        plan = answer.plan(holding, tokens)
        if plan is None:
            continue
        before = holding.pages + layers * (tokens // size - holding.first_block)
        assert tokens % size == 0
        assert tokens - holding.first_block * size >= interval
        assert tokens + 1 < answer.last
        assert plan.pages < before
        standing = window + count_before(answer.spans, answer.prefilled)
        assert plan.floor_pages == max(-(-standing // size), 1)
        assert layers * plan.floor_pages <= plan.pages
        assert -(-before // layers) <= plan.full_blocks
        assert plan.tail == 0
        if frozen is not None:
            assert plan.pages == frozen
        packed, frozen = plan.blocks, plan.pages
        holding.pack(plan, tokens // size, freeze=True)
        assert holding.most_pages * layers >= holding.pages


@prop
@given(answers())
def test_the_most_that_is_held(case):
    answer, holding, packed = case
    most = answer.most_blocks(holding, packed=packed, tokens=answer.last - 1)
    size, own, seen = holding.block_size, packed, []
    for tokens in range(answer.prefilled, answer.last):
        seen.append(own + -(-tokens // size) - holding.first_block)
        plan = answer.plan(holding, tokens) if tokens > answer.prefilled else None
        if plan is not None:
            own = plan.blocks
            holding.pack(plan, tokens // size, freeze=True)
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
        (
            {"decode_budget": 9, "compress": "cake-chunk"},
            "decode_budget=9 tokens per layer cannot hold the decode window of 8 tokens and 2"
            " chunks of 20 tokens; set decode_budget to at least 48",
        ),
        ({"decode_budget": 47, "compress": "cake-chunk"}, "set decode_budget to at least 48"),
        ({"decode_budget": 27, "compress": "chunkkv"}, "set decode_budget to at least 28"),
        (
            {"decode_budget": 39, "selector": "chunks", "selector_params": {"size": 16}},
            "and 2 chunks of 16 tokens; set decode_budget to at least 40",
        ),
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


def test_the_least_decode_budgets():
    """Whoever asks: the server's flag, a method that requests may ask for, an alias, a request."""
    for method, least in {"cake-chunk": 48, "chunkkv": 28, "snapkv": 9, "streamingllm": 1}.items():
        made = config(compress=method, decode_budget=least)
        assert made.least_decode_budget == least
    server = {"decode_budget": 32, "compress": "snapkv"}
    with pytest.raises(ConfigError, match="allow_override='cake-chunk': decode_budget=32"):
        config(**server, allow_override="cake-chunk")
    with pytest.raises(ConfigError, match="alias 'short': decode_budget=32"):
        config(**server, alias={"short": "cake-chunk:0.2"})
    own = config(compress="cake-chunk", decode_budget=64, allow_override="cake-chunk")
    with pytest.raises(OverrideError, match=r"decode_budget=17 .* at least 48"):
        settings_for(own, {"kv_decode_budget": 17})
    assert settings_for(own, {"kv_decode_budget": 48}).decode_budget == 48


def test_windows_that_judge_an_answer():
    for name, window in {"tova": 1, "streamingllm": 0, "cake": 8, "cake-chunk": 8}.items():
        assert config(compress=name, decode_budget=64).resolved_decode_window == window
    assert config(decode_budget=64, decode_window=20).resolved_decode_window == 20
