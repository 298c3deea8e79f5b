"""Every preset keeps the same tokens in the engine as on plain tensors, in any batch."""

import pytest
import torch

from added_methods import installed, write_package
from checkpoints import SHAPES, tokens
from engines import BLOCK, V2, engine, model_runner_v1_only, settings
from recordings import packed_pages, prompt_inputs, tail_pages, watch_selections
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.registry import PRESETS
from vllm_kvcompress.offline import compress
from vllm_kvcompress.planning import memory
from vllm_kvcompress.settings.config import CompressionConfig

NAME = "llama-gqa"
PRESET_NAMES = ["d2o"] if V2 else list(PRESETS)
LENGTHS = [417, 256, 150, 90]
PROMPTS = [tokens(length, seed=60 + length) for length in LENGTHS]
NEW = 8
READS_COLUMN_SUMS = {
    name
    for name in PRESETS
    if Reads.COLUMN_SUMS in CompressionConfig.parse({"compress": name}).method.reads
}


@pytest.fixture(scope="module")
def plain(model):
    with engine(model) as llm:
        return llm.generate(PROMPTS, NEW)


@pytest.fixture(scope="module")
def long_blocks(model):
    with engine(
        model, additional_config=settings(budget=0.1, allow_override="all"), block_size=128,
        blocks=24, max_model_len=1536, max_num_batched_tokens=1536, max_num_seqs=1,
    ) as llm:  # fmt: skip
        yield llm


@model_runner_v1_only
@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_every_layer_keeps_a_page_besides_its_tail(preset, long_blocks):
    """1,025 tokens in blocks of 128 at 0.1: 101 tokens besides the tail's one are less than a page.

    Every layer keeps a page, and no page of the last destination block is unused.
    """
    with long_blocks.lent() as llm:
        llm.submit("r", tokens(1025, seed=9), NEW, extra_args={"kv_compress": preset})
        while not llm.compressor.compressed:
            llm.step()
        pages = [keys.shape[1] // 128 for keys, _ in packed_pages(llm)]
        (request,) = llm.running()
        assert pages == [1] * SHAPES[NAME].layers
        assert llm.num_blocks_held(request.request_id) == 2


# parameters of parts, which a request cannot choose
VARIANTS = {
    # Layers 1 and 2 reuse layer 0's ranking, so a batch of layers is only partly read.
    "chunkkv, rankings reused": {"selector_params": {"reuse": 3}},
}
if not V2:
    by_norm = {"aggregate": "max", "value_norm": True}
    VARIANTS |= {
        "pyramidkv, maximum times value norms": {"scorer_params": by_norm},
        "caote, defensive, with a variance": {
            "allocator": "cake", "scorer_params": {"aggregate": "defensive"},
        },
        "d2o, only values merged": {"merge": "values"},
        "custom, reads keys and values": {"scorer": "lagkv", "scorer_params": {"lag": 50}},
    }  # fmt: skip


def in_three_chunks(model, config):
    options = {"max_num_batched_tokens": 150, "max_num_seqs": 4, "max_model_len": 1024}
    return engine(model, additional_config=config, enable_prefix_caching=False, **options)


@pytest.fixture(scope="module", autouse=True)
def two_layers_per_launch():
    """Score two layers per launch, as with prompts that are long for the device's memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_MIN_SCORED_TOKENS", 0)
        yield


@pytest.fixture(scope="module")
def any_preset(model):
    with in_three_chunks(model, settings(budget=0.4, allow_override="all")) as llm:
        yield llm


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_engine_and_offline_keep_the_same_tokens(preset, any_preset, plain):
    """The engine computes the prompt in three chunks; offline gets all of it, layer by layer."""
    with any_preset.lent() as llm:
        check_kept_tokens(llm, settings(preset, 0.4), plain, {"kv_compress": preset})


@pytest.mark.parametrize("variant", VARIANTS)
def test_engine_and_offline_keep_the_same_tokens_with_parameters(variant, model, plain):
    config = settings(variant.partition(",")[0], 0.4, **VARIANTS[variant])
    with in_three_chunks(model, config) as llm:
        check_kept_tokens(llm, config, plain)


def check_kept_tokens(llm, config, plain, extra_args=None):
    """Check positions, keys and values of a prompt's pages and tail against `compress`."""
    shape, prompt = SHAPES[NAME], PROMPTS[0]
    assert llm.compressor.packer.rows_per_launch(len(prompt)) == 2
    seen, selections = llm.record_attention(), watch_selections(llm)
    llm.submit("r", prompt, NEW, extra_args=extra_args)
    while not llm.compressor.compressed:
        llm.step()
    held, tails = packed_pages(llm), tail_pages(llm)
    got = next(iter(llm.drain().values()))
    assert got[0] == plain[0][0]
    q, k, v = prompt_inputs(seen, len(prompt), shape.head_dim)
    full_block_tokens = len(prompt) // BLOCK * BLOCK
    want = compress(q, k, v, policy=config["kvcompress"], budget=0.4, page_size=BLOCK)
    for layer, (keys, values) in enumerate(held):
        packed = want.positions[layer][:, : keys.shape[1]]
        assert (want.positions[layer][:, keys.shape[1] :] >= full_block_tokens).all()
        assert torch.equal(selections[0][layer], packed)
        count = keys.shape[1]
        torch.testing.assert_close(keys, want.keys[layer][:, :count], rtol=1e-5, atol=1e-6)
        if (
            config["kvcompress"] != settings("d2o", 0.4)["kvcompress"]
        ):  # D2O merges keys; the other methods only move them
            assert torch.equal(keys, k[layer].gather(1, packed[..., None].expand_as(keys)))
        torch.testing.assert_close(values, want.values[layer][:, :count], rtol=1e-5, atol=1e-6)
        tail = len(prompt) % BLOCK  # D2O merges tokens into the tail too
        for engine_tail, expected in zip(tails[layer], (want.keys, want.values), strict=True):
            expected_tail = expected[layer][:, count:]
            torch.testing.assert_close(engine_tail[:, :tail], expected_tail, rtol=1e-5, atol=1e-6)


@model_runner_v1_only
def test_a_scorer_of_another_package_chooses_the_kept_tokens(model, tmp_path):
    """A request names its preset; the engine keeps the even positions that it ranks first."""
    prompt = PROMPTS[0]  # of 13 blocks and a token
    config = settings(budget=0.4, allow_override="evens")
    with (
        installed(write_package(tmp_path)),
        engine(
            model,
            additional_config=config,
            max_num_batched_tokens=150,
            max_num_seqs=4,
            max_model_len=1024,
        ) as llm,
    ):
        selections = watch_selections(llm)
        llm.generate([prompt], NEW, extra_args={"kv_compress": "evens"})
    # the window of 4 ends with the tail's token, which lies in no page
    in_window = [*range(len(prompt) - 4, len(prompt) - 1)]
    (layers,) = selections
    for positions in layers:
        num_past = positions.shape[1] - len(in_window)
        assert num_past > BLOCK
        expected = [*range(0, 2 * num_past, 2), *in_window]
        assert positions.tolist() == [expected] * SHAPES[NAME].kv_heads


@pytest.fixture(scope="module")
def in_chunks(model):
    """Outputs of prompts computed in many steps, by the preset that each request asks for."""
    with engine(
        model, additional_config=settings(budget=0.4, allow_override="all"), max_num_seqs=4,
        max_num_batched_tokens=48, max_model_len=1024, enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        return {
            preset: llm.generate(PROMPTS, NEW, extra_args={"kv_compress": preset})
            for preset in PRESET_NAMES
        }


@pytest.fixture(scope="module")
def with_prefix_cache(model):
    with engine(model, additional_config=settings(budget=0.4, allow_override="all")) as llm:
        yield llm


@model_runner_v1_only
@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_outputs_do_not_depend_on_batch_order_or_chunks(
    preset, with_prefix_cache, plain, in_chunks
):
    ask = {"extra_args": {"kv_compress": preset}}
    with with_prefix_cache.lent() as llm:
        alone = [llm.generate([prompt], NEW, **ask)[0] for prompt in PROMPTS]
        assert [out[0] for out in alone] == [out[0] for out in plain]
        assert alone[-1] == plain[-1]  # shorter than min_prompt
        assert llm.compressor.compressed == 3
        assert llm.generate(PROMPTS[::-1], NEW, **ask) == alone[::-1]
        warm = llm.outputs(PROMPTS, NEW, **ask)
        assert [list(output.outputs[0].token_ids) for output in warm] == alone
        cached = [output.num_cached_tokens for output in warm]
        assert all(n == 0 for n in cached[:3]) == (preset in READS_COLUMN_SUMS)
        assert cached[3] > 0
    assert in_chunks[preset] == alone


@model_runner_v1_only
def test_mixed_presets_in_one_batch_equal_separate_runs(model):
    """Each request asks for its own preset, which its plan carries."""
    prompt = PROMPTS[0]
    request_args = {
        preset: {"kv_compress": preset, "kv_budget": 0.25 + 0.05 * (i % 4)}
        for i, preset in enumerate(PRESET_NAMES)
    }
    config = settings(allow_override="all")
    with engine(model, additional_config=config, enable_prefix_caching=False) as llm:

        def run(names):
            for name in names:
                llm.submit(name, prompt, NEW, extra_args=request_args[name])
            return llm.drain()

        alone = {name: run([name])[name] for name in PRESET_NAMES}
        assert run(PRESET_NAMES) == alone
        assert run(PRESET_NAMES[::-1]) == alone
        assert len({tuple(output) for output in alone.values()}) > 1


@model_runner_v1_only
def test_column_sums_start_again_after_a_preemption(any_preset):
    """Column sums of an interrupted prefill must not be counted twice."""
    prompt, ask = PROMPTS[0], {"extra_args": {"kv_compress": "h2o", "kv_budget": 0.3}}
    with any_preset.lent() as llm:
        alone = llm.generate([prompt], NEW, **ask)[0]
        llm.submit("r", prompt, NEW, **ask)
        for _ in range(2):
            llm.step()
        assert llm.compressor._prefills
        assert llm.llm.reset_prefix_cache(reset_running_requests=True)
        assert next(iter(llm.drain().values())) == alone
        assert llm.compressor.compressed == 2
        assert not llm.compressor._prefills


@model_runner_v1_only
def test_d2o_merges_only_into_its_own_requests_tail(any_preset, with_prefix_cache):
    """The tail stays in place and merging rewrites it; no cached block may change."""
    first, second = PROMPTS[0], PROMPTS[0][:300]
    ask = {"extra_args": {"kv_compress": "d2o", "kv_budget": 0.3}}
    with any_preset.lent() as llm:
        alone = [llm.generate([prompt], NEW, **ask)[0] for prompt in (first, second)]
    with with_prefix_cache.lent() as llm:
        assert llm.generate([first, second, first], NEW, **ask) == [*alone, alone[0]]
        hashed = torch.tensor([b.block_id for b in llm.pool.blocks if b.block_hash is not None])
        pages = llm.compressor.pool.pages
        flat = torch.cat([llm.compressor.pool.flat_ids(layer, hashed) for layer in range(4)])
        before = pages[flat].clone()
        llm.generate([first, second], 3, **ask)
        assert torch.equal(pages[flat], before)
