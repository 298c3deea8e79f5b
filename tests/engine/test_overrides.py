"""Requests with their own method and budget on the real engine."""

import pytest

from checkpoints import tokens
from engines import BLOCK, engine, settings
from vllm_kvcompress.engine.messages.options import attach_options, options_of
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.request_options import RequestChoices, RequestOptions

PROMPT = tokens(600, seed=3)
NEW = 10


@pytest.fixture(scope="module")
def plain(model):
    """Return vLLM's own outputs."""
    with engine(model, enable_prefix_caching=False) as llm:
        return llm.generate([PROMPT, PROMPT[:300]], NEW)


@pytest.fixture(scope="module")
def shared(model):
    config = settings("cake", 0.4, allow_override="all")
    with engine(model, additional_config=config, max_model_len=2048) as llm:
        yield llm


@pytest.fixture
def llm(shared):
    with shared.lent():
        yield shared


ASKS = {
    "off": {"kv_compress": "off"},
    "own": {},
    "little": {"kv_budget": 0.1},
    "much": {"kv_budget": 0.9},
    "count": {"kv_budget": 150},
    "snapkv": {"kv_compress": "snapkv"},
    "h2o": {"kv_compress": "h2o", "kv_budget": 0.3},
    "d2o": {"kv_compress": "d2o", "kv_budget": 0.3},
    "all": {"kv_budget": 1.0},
}


def run(llm, names, prompt=PROMPT):
    for name in names:
        llm.submit(name, prompt, NEW, extra_args=ASKS[name] or None)
    return llm.drain()


@pytest.fixture(scope="module")
def alone(shared):
    """Return the output of each of `ASKS` alone, without cached blocks."""
    outputs = {}
    for name in ASKS:
        with shared.lent() as llm:
            outputs |= run(llm, [name])
    return outputs


def test_budgets_and_methods_change_the_output(alone, plain):
    assert alone["off"] == alone["all"] == plain[0]
    assert len({tuple(answer) for answer in alone.values()}) > 3


@pytest.mark.parametrize("caching", [False, True])
def test_a_mixed_batch_gives_the_same_outputs_as_single_requests(model, alone, caching):
    """In both orders, with chunked prefill, and with a prefix cache that other requests filled."""
    with engine(
        model,
        additional_config=settings("cake", 0.4, allow_override="all"),
        max_num_batched_tokens=160,
        max_num_seqs=8,
        max_model_len=1024,
        enable_prefix_caching=caching,
    ) as llm:
        free = llm.free_blocks
        assert run(llm, list(ASKS)) == alone
        assert run(llm, list(ASKS)[::-1]) == alone
        assert llm.free_blocks == free


def test_each_request_holds_the_blocks_of_its_own_budget(llm):
    layers = llm.compressor.packer.num_layers
    num_blocks = {}
    for name, extra_args in ASKS.items():
        llm.submit(name, PROMPT, NEW, extra_args=extra_args or None)
    while len(llm.running()) < len(ASKS) or llm.scheduler.waiting:
        llm.step()
    for request in llm.running():
        num_blocks[request.request_id.split("-")[0]] = llm.num_blocks_held(request.request_id)
    llm.drain()
    for name, extra_args in ASKS.items():
        raw_settings = {"compress": extra_args.get("kv_compress", "cake"), "min_prompt": 128}
        raw_settings["budget"] = extra_args.get("kv_budget", 0.4)
        config = CompressionConfig.parse(raw_settings)
        plan = page_plan(config.budget_spec(layers, len(PROMPT)), BLOCK) if config.enabled else None
        full = -(-len(PROMPT) // BLOCK)
        expected = full if plan is None else plan.blocks + full - plan.full_blocks
        assert num_blocks[name] == expected, name


def test_a_compressed_and_an_uncompressed_request_share_a_prompt(llm, plain):
    """In either order, the second request finds uncompressed blocks or none."""
    first = run(llm, ["own", "off"])
    assert first["off"] == plain[0]
    again = run(llm, ["off", "own"])
    assert again == first
    (output,) = llm.outputs([PROMPT], NEW, extra_args=ASKS["off"])
    assert output.num_cached_tokens == len(PROMPT) // BLOCK * BLOCK
    (output,) = llm.outputs([PROMPT], NEW)
    window = CompressionConfig.parse({"compress": "cake"}).resolved_window
    assert 0 < output.num_cached_tokens <= len(PROMPT) - window


def test_methods_with_column_sums_do_not_read_the_prefix_cache(llm):
    cold = run(llm, ["h2o"])
    run(llm, ["off"])
    (output,) = llm.outputs([PROMPT], NEW, extra_args=ASKS["h2o"])
    assert output.num_cached_tokens == 0
    assert list(output.outputs[0].token_ids) == cold["h2o"]


def test_methods_without_queries_compute_only_uncached_tokens(model):
    """The window is taken from the prefix cache too, so 24 tokens are left to compute."""
    compression = settings("custom", 0.3, scorer="keydiff", window=32, allow_override="all")
    asks = [{}, {"kv_compress": "random"}, {"kv_compress": "streamingllm"}]
    with engine(model, additional_config=compression) as llm:
        for extra_args in asks:
            assert llm.llm.reset_prefix_cache()
            cold, warm = (
                llm.outputs([PROMPT], NEW, extra_args=extra_args or None) for _ in range(2)
            )
            assert cold[0].num_cached_tokens == 0
            assert warm[0].num_cached_tokens == len(PROMPT) // BLOCK * BLOCK == 576
            assert warm[0].outputs[0].token_ids == cold[0].outputs[0].token_ids
        assert llm.compressor.compressed == 2 * len(asks)


def test_opt_in_leaves_other_requests_uncompressed(model, plain):
    """--kv-compress off --kv-allow-override snapkv, as in the runbook's canary."""
    opt_in = settings("off", 0.2, allow_override="snapkv")
    with engine(model, additional_config=opt_in, enable_prefix_caching=False) as llm:
        assert llm.generate([PROMPT, PROMPT[:300]], NEW) == plain
        assert llm.compressor.compressed == 0
        extra_args = llm.generate([PROMPT], NEW, extra_args={"kv_compress": "snapkv"})
        assert llm.compressor.compressed == 1
    with engine(
        model, additional_config=settings("snapkv", 0.2), enable_prefix_caching=False
    ) as llm:
        assert llm.generate([PROMPT], NEW) == extra_args


def test_offline_a_wrong_value_is_refused_before_the_engine_sees_it(model):
    from vllm.exceptions import VLLMValidationError

    bounds = settings("cake", 0.3, allow_override="off", budget_bounds="0.1:0.5")
    with engine(model, additional_config=bounds) as llm:
        with pytest.raises(VLLMValidationError, match=r"between 0\.1 and 0\.5 on this server"):
            llm.generate([PROMPT], NEW, extra_args={"kv_budget": 0.6})
        with pytest.raises(VLLMValidationError, match=r"one of \['cake', 'off'\]"):
            llm.generate([PROMPT], NEW, extra_args={"kv_compress": "h2o"})
        for misspelt in ("kv_bugdet", "kv-budget", "budget", "kvbudget"):
            words = f"'{misspelt}' is unknown; did you mean 'kv_budget'"
            with pytest.raises(VLLMValidationError, match=words):
                llm.generate([PROMPT], NEW, extra_args={misspelt: 0.2})
        with pytest.raises(VLLMValidationError, match="but is inside 'vllm_xargs'"):
            llm.generate([PROMPT], NEW, extra_args={"vllm_xargs": {"kv_budget": 0.2}})
        assert not llm.llm.llm_engine.has_unfinished_requests()
        assert not llm.scheduler.requests
        (output,) = llm.outputs([PROMPT[:100]], NEW)
        assert output.kv_compress is None
        assert len(llm.generate([PROMPT], NEW)[0]) == NEW


@pytest.mark.parametrize("budget", [10**19, 2049])
def test_a_request_budget_above_max_model_len_is_refused(llm, budget):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=f"must be at most 2048, .* got {budget}; "):
        llm.generate([PROMPT], NEW, extra_args={"kv_budget": budget})
    assert len(llm.generate([PROMPT], NEW, extra_args={"kv_budget": 2048})[0]) == NEW


def test_without_compression_choices_are_refused(model):
    from vllm.exceptions import VLLMValidationError

    with engine(model) as llm:
        with pytest.raises(VLLMValidationError, match="runs without KV-cache compression"):
            llm.generate([PROMPT], NEW, extra_args={"kv_compress": "cake"})
        (output,) = llm.outputs([PROMPT], NEW, extra_args={"kv_compress": "off", "budget": 3})
        assert len(output.outputs[0].token_ids) == NEW
        assert output.kv_compress is None


def test_switched_off_servers_accept_all_settings(model, plain):
    """After a rollback, settings that were valid before are accepted and ignored."""
    asks = [{"kv_compress": "cake"}, {"kv_budget": 0.2}, {"kv_compress": "off", "kv_budget": 0.2}]
    switched_off = {"kvcompress": {"compress": "off", "allow_override": "off"}}
    with engine(model, additional_config=switched_off, enable_prefix_caching=False) as llm:
        for ask in asks:
            assert llm.generate([PROMPT], NEW, extra_args=ask) == plain[:1]


@pytest.mark.parametrize("extra_args", [None, {"kv_budget": 0.3, "kv_protect": "3:9"}])
def test_options_are_built_once_before_the_scheduler_and_once_in_it(llm, extra_args, monkeypatch):
    calls = []

    def counting(name, function):
        def called(*args):
            calls.append(name)
            return function(*args)

        return called

    monkeypatch.setattr(RequestOptions, "parse", counting("parse", RequestOptions.parse))
    monkeypatch.setattr(RequestChoices, "resolve", counting("resolve", RequestChoices.resolve))
    llm.generate([PROMPT], NEW, extra_args=extra_args)
    assert llm.compressor.compressed == 1
    assert calls == ["parse", "resolve", "resolve"]


@pytest.mark.parametrize(
    "forged",
    [
        {"choice": ["off"], "spans": [[0, 599]]},
        {"choice": ["h2o", 1.0]},
        ["off"],
        None,
    ],
)
def test_options_that_a_client_sends_are_replaced(llm, forged):
    """Also in the parameters that the scheduler reads; the client's parameters do not change."""
    from vllm.sampling_params import SamplingParams

    sent = {"kvcompress_options": forged, "kv_budget": 0.3}
    params = SamplingParams(max_tokens=NEW, extra_args=dict(sent))
    processor = llm.llm.llm_engine.input_processor
    prompt = {"type": "token", "prompt_token_ids": PROMPT}
    request = processor.process_inputs("r", prompt, params, supported_tasks=("generate",))
    options = options_of(llm.worker.settings, request.sampling_params)
    assert (options.choice, options.spans) == (RequestChoices(budget=0.3), ())
    assert params.extra_args == sent
    honest = llm.generate([PROMPT], NEW, extra_args={"kv_budget": 0.3})
    assert llm.generate([PROMPT], NEW, extra_args=sent) == honest
    assert llm.compressor.compressed == 2


def test_equal_choices_give_the_same_settings_object():
    """The scheduler remembers plans by the identity of a request's settings."""
    from vllm.sampling_params import SamplingParams

    engine_settings = CompressionConfig.parse({"compress": "cake", "allow_override": "all"})
    params = [SamplingParams() for _ in range(2)]
    for each in params:
        attach_options(each, RequestOptions.parse(engine_settings, {"kv_budget": 0.25}))
    first, second = (options_of(engine_settings, each).settings for each in params)
    assert first is second
    assert first.budget == 0.25


def test_unchecked_requests_stay_uncompressed(llm, plain):
    """Without the API server's check the engine serves the request uncompressed."""
    name = llm.submit("r", PROMPT, NEW, extra_args=ASKS["off"])
    (request,) = llm.scheduler.requests.values()
    request.sampling_params.extra_args = {"kv_compress": ["cake"], "kv_budget": "x"}
    (answer,) = llm.drain().values()
    assert name == "r"
    assert answer == plain[0]
    assert llm.compressor.compressed == 0


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"choice": ["cake", 0.3]},
        {"choice": [[1], 0.3, None, None, None, None], "spans": []},
        {"choice": ["cake"], "spans": [[1]]},
        {"choice": ["cake"], "spans": [1]},
        {"choice": [None] * 9, "spans": []},
    ],
    ids=str,
)
def test_malformed_options_of_a_script_leave_its_prompt_uncompressed(message):
    """A script may add requests to the engine core directly. They must not end the engine."""
    from vllm.sampling_params import SamplingParams

    from vllm_kvcompress.engine.messages.options import options_of
    from vllm_kvcompress.errors import OverrideError

    engine_settings = CompressionConfig.parse({"compress": "cake", "allow_override": "all"})
    params = SamplingParams(extra_args={"kvcompress_options": message})
    with pytest.raises(OverrideError, match="must be as the API server writes it"):
        options_of(engine_settings, params)
