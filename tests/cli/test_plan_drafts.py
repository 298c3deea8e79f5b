"""``kvcompress plan --speculative-config``: blocks and refusals equal the engine's."""

import json
from functools import partial
from pathlib import Path

import pytest

from checkpoints import tokens
from draft_checkpoints import make_eagle, make_eagle3, make_with_mtp
from engines import engine, settings
from plans import CPU_FLAGS, held_blocks, make_forecast, plan_on_cpu
from vllm_kvcompress.commands.plan.drafts import drafts_of
from vllm_kvcompress.commands.plan.model_shape import read_config
from vllm_kvcompress.engine.device_memory import device_bytes
from vllm_kvcompress.engine.messages.settings import active_settings
from vllm_kvcompress.errors import ConfigError


def with_drafts(tiny: str, method: str) -> tuple[str, dict]:
    """Return a model, and its `speculative_config` of 3 drafts per step by `method`."""
    drafts = {"method": method, "num_speculative_tokens": 3}
    if method == "mtp":
        return make_with_mtp(Path(tiny).parent), drafts
    heads = {"eagle": make_eagle, "eagle3": make_eagle3}
    return tiny, drafts | ({"model": heads[method](tiny)} if method in heads else {})


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore:(?s).*reflected list")  # from numba, which drafts n-grams
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "ngram"])
def test_blocks_and_bytes_with_drafts_equal_the_engines(method, tiny):
    """A draft layer's pages and the slots of drafts are in blocks that requests hold."""
    model, drafts = with_drafts(tiny, method)
    config = settings("cake", 0.2, lookahead=4)
    sizes = dict(max_model_len=2048, max_num_seqs=64)
    planned = dict(longest=2048, requests=64, speculative=json.dumps(drafts))
    with engine(model, additional_config=config, speculative_config=drafts, **sizes) as llm:
        cache, engine_config = llm.scheduler.kv_cache_config, llm.worker.vllm_config
        # Drafts behind the prompt or behind the output's end need a block of their own.
        for length, output in ((1022, 40), (1000, 23), (1000, 70)):
            result = plan_on_cpu(model, length, output, config["kvcompress"], **planned)
            forecast = result.forecast
            held = held_blocks(llm, tokens(length, seed=1), output)
            assert result.drafts.layers == (method != "ngram")
            assert held[0] == forecast.off.prefill
            assert min(held) == forecast.on.decoding < forecast.off.decoding
            # A prompt of random tokens has no n-gram to draft from.
            assert held[-1] == forecast.on.end or method == "ngram"
            assert held[-1] <= forecast.on.end
        taken = sum(tensor.size for tensor in cache.kv_cache_tensors)
        assert forecast.block_bytes * cache.num_blocks == taken
        compression = active_settings(engine_config.additional_config)
        assert forecast.extra_bytes == device_bytes(engine_config, compression)
    without = make_forecast(model, 1000, 70, config["kvcompress"], longest=2048, requests=64)
    assert (forecast.block_bytes > without.block_bytes) == (method != "ngram")
    assert (forecast.on.decoding > without.on.decoding) == (method != "ngram")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"method": "ngram_gpu"}, {}),
        ({"attention_backend": "TRITON_ATTN"}, {}),
        ({"kv_heads": 4}, {}),
        ({"head_dim": 64}, {}),
        ({}, {"packed_dtype": "k4v3"}),
        ({}, {"decode_budget": 96}),
        ({}, {"max_whole": 512}),
    ],
    ids=str,
)
def test_drafts_are_refused_in_the_servers_words(changes, given, tiny, wide):
    model = wide if "packed_dtype" in given else tiny
    shape = {name: size for name, size in changes.items() if isinstance(size, int)}
    drafts = {"method": "eagle", "num_speculative_tokens": 3, "model": make_eagle(model, **shape)}
    drafts |= {name: value for name, value in changes.items() if name not in shape}
    config = settings("cake", 0.5, **given)
    plan = partial(plan_on_cpu, model, 1000, 8, config["kvcompress"], longest=2048)
    with pytest.raises(ConfigError) as planned:
        plan(speculative=json.dumps(drafts))
    with (
        pytest.raises(ConfigError) as refused,
        engine(model, additional_config=config, max_model_len=2048, speculative_config=drafts),
    ):
        pass
    # The server names a layer of the draft model, and the method first.
    said = str(planned.value).replace(f"but {drafts['model']}", "but model.layers.4.self_attn.attn")
    assert str(refused.value).removeprefix("--kv-compress cake: ") == said


def test_the_plan_names_draft_layers(plan_text, plan_json, tiny):
    flags = [tiny, "--len", 1000, *CPU_FLAGS]
    for method, layers in (("eagle", 1), ("ngram", 0)):
        drafts = json.dumps(with_drafts(tiny, method)[1])
        assert plan_json(*flags, "--speculative-config", drafts)["draft_layers"] == layers
        text = " ".join(plan_text(*flags, "-sc", drafts).split())
        assert ("draft model's 1 layer keeps all tokens in the same blocks" in text) == layers
    assert plan_json(*flags)["draft_layers"] == 0


def test_a_draft_models_weights_are_part_of_the_estimate(tiny):
    drafts = json.dumps(with_drafts(tiny, "eagle")[1])
    plan = partial(plan_on_cpu, tiny, 1000, 8, settings()["kvcompress"], device="cuda")
    without, with_head = (
        plan(gpu_gib=80.0, speculative=given).estimated.weights_bytes for given in (None, drafts)
    )
    head = Path(json.loads(drafts)["model"], "model.safetensors").stat().st_size
    assert 0.9 * head < with_head - without <= head


@pytest.mark.parametrize(
    ("name", "method"),
    [("EAGLE-x", "eagle"), ("x-EAGLE3", "eagle3"), ("x", "draft_model"), ("x-DFlash", "dflash")],
)
def test_a_draft_models_name_says_its_method(name, method, tiny, tmp_path):
    head = tmp_path / name
    head.symlink_to(with_drafts(tiny, "eagle")[1]["model"])
    given = json.dumps({"model": str(head), "num-speculative-tokens": 2})
    assert drafts_of(given, tiny, read_config(tiny)).method == method
