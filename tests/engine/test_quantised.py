"""Compression of an fp8 KV cache: kept tokens stay bit-identical, and scores use cached values.

vLLM quantises with one scale per layer for keys and one for values. The reference quantises the
recorded keys and values of the attention layers itself.
"""

import pytest
import torch

from amx_layout import pretend_amx, pretend_no_amx
from checkpoints import SHAPES, tokens
from engines import BLOCK, engine, settings
from processor import needs_avx512
from quantised import FLOAT8, as_cached, scaled, scales
from recordings import packed_pages, prompt_inputs, recorded, watch_selections
from test_added_pieces import ANSWER, BOUND, INTERVAL, PieceSumsReplay
from test_added_pieces import pieces_settings as bounded_pieces_settings
from test_probes import PROBE, ProbeReplay
from test_prompts_in_pieces import PieceReplay, pieces_settings
from vllm_kvcompress.engine.compression.tiled_mover import TiledMover
from vllm_kvcompress.methods.registry import PRESETS
from vllm_kvcompress.offline import compress

pytestmark = needs_avx512

LENGTHS = [417, 256, 150, 90]
PROMPTS = [tokens(length, seed=60 + length) for length in LENGTHS]
NEW = 8
MERGING = {name for name in PRESETS if PRESETS[name].merge}


@pytest.fixture(scope="module")
def models(model, checkpoints_folder, tmp_path_factory):
    """Return a checkpoint path by cache dtype; vLLM supports scales only for e4m3."""
    scaled_model = scaled("llama-gqa", checkpoints_folder, tmp_path_factory.mktemp("scaled"))
    return {"fp8": scaled_model, "fp8_e5m2": model}


def quantise(replay, cache_dtype):
    dtype = FLOAT8[cache_dtype]
    for layer in range(replay.shape.layers):
        of_layer = scales(layer) if cache_dtype == "fp8" else (1.0, 1.0)
        for part, scale in zip("kv", of_layer, strict=True):
            for parts in (replay.parts, *getattr(replay, "probe_inputs", {}).values()):
                exact = torch.from_numpy(parts[layer, part])
                parts[layer, part] = as_cached(exact, scale, dtype).numpy()


@pytest.mark.parametrize("cache_dtype", FLOAT8)
def test_a_budget_of_1_does_not_change_outputs(cache_dtype, models):
    outputs = []
    for config in ({}, {"additional_config": settings("cake", 1.0)}):
        with engine(models[cache_dtype], kv_cache_dtype=cache_dtype, **config) as llm:
            outputs.append(llm.generate(PROMPTS, 12))
    assert outputs[0] == outputs[1]


METHODS = ["snapkv", "cake", "cake-chunk", "tova", "caote", "streamingllm"]


@pytest.mark.parametrize("cache_dtype", FLOAT8)
@pytest.mark.parametrize("method", METHODS)
def test_attention_matches_the_reference(method, cache_dtype, models):
    """A prompt in pieces is scored with cached keys and values, including those of its probes."""
    length, max_tokens, shape = 531, 40, SHAPES["llama-gqa"]
    config, prompt = pieces_settings(method, **PROBE), tokens(length, seed=5)
    options = {"kv_cache_dtype": cache_dtype, "max_num_batched_tokens": 70}
    recording = recorded(models[cache_dtype], config, prompt, max_tokens, **options).seen
    # a method that scores by position needs no probe
    replay_class = PieceReplay if method == "streamingllm" else ProbeReplay
    replay = replay_class(method, shape, recording, length, int(length * 0.4))
    quantise(replay, cache_dtype)
    replay.replay_all(length + max_tokens)
    assert len(replay.packed_at) >= 3


def test_a_decode_budget_after_pieces_matches_the_reference(models):
    """H2O adds up attention over the pieces and then over the decode intervals."""
    length, shape = 480, SHAPES["llama-gqa"]
    config = bounded_pieces_settings("h2o", 0.4, decode_budget=BOUND, decode_interval=2 * INTERVAL)
    options = {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 70}
    recording = recorded(models["fp8"], config, tokens(length, seed=5), ANSWER, **options).seen
    replay = PieceSumsReplay("h2o", shape, recording, length, int(length * 0.4))
    replay.interval = 2 * INTERVAL
    quantise(replay, "fp8")
    replay.steps(0, length + ANSWER - 1)
    assert replay.boundaries[-1] == length
    assert replay.packed_at


NOT_MERGING = sorted(PRESETS.keys() - MERGING)
PARTS = {"caote, budgets by its scores": {"allocator": "global"}}


@pytest.mark.parametrize("preset", [*NOT_MERGING, *PARTS])
def test_kept_tokens_are_bit_identical_to_cached_ones(preset, models):
    """Kept tokens match `offline.compress` on the dequantised tensors, and bytes are unchanged."""
    shape, prompt = SHAPES["llama-gqa"], PROMPTS[0]
    config = settings(preset.partition(",")[0], 0.4, **PARTS.get(preset, {}))
    options = dict(max_num_batched_tokens=150, max_num_seqs=4, max_model_len=1024)
    with engine(models["fp8"], kv_cache_dtype="fp8", additional_config=config, **options) as llm:
        seen, selections = llm.record_attention(), watch_selections(llm)
        llm.submit("r", prompt, NEW)
        while not llm.compressor.compressed:
            llm.step()
        cached_layers = packed_pages(llm)
        llm.drain()
    parts = prompt_inputs(seen, len(prompt), shape.head_dim)
    for layer in range(shape.layers):
        for which, scale in zip((1, 2), scales(layer), strict=True):
            parts[which][layer] = as_cached(parts[which][layer], scale, FLOAT8["fp8"])
    expected = compress(*parts, policy=config["kvcompress"], budget=0.4, page_size=BLOCK)
    for layer, cached in enumerate(cached_layers):
        count = cached[0].shape[1]
        assert torch.equal(selections[0][layer], expected.positions[layer][:, :count])
        for part, exact, scale in zip(
            cached, (expected.keys, expected.values), scales(layer), strict=True
        ):
            assert part.dtype == FLOAT8["fp8"]
            assert torch.equal(
                part.float(), (exact[layer][:, :count] / scale).to(part.dtype).float()
            )


@pytest.mark.parametrize("cache_dtype", FLOAT8)
def test_amx_and_vector_layouts_give_equal_outputs(cache_dtype, models, monkeypatch):
    """The AMX and vector layouts give equal outputs, with batches and a decode budget."""
    outputs = {}
    bounds = {"decode_budget": 64, "decode_interval": BLOCK}
    config = settings("cake", 0.3, allow_override="caote,tova", **bounds)
    for kind, pretend in (("vectors", pretend_no_amx), ("tiles", pretend_amx)):
        pretend(monkeypatch)
        options = dict(
            dtype="bfloat16", kv_cache_dtype=cache_dtype, max_num_seqs=4, max_model_len=1024
        )
        # a small pool, because the AMX emulation copies all pages for each layer
        with engine(models[cache_dtype], blocks=1 + 96, additional_config=config, **options) as llm:
            assert isinstance(llm.compressor.packer.mover, TiledMover) == (kind == "tiles")
            assert llm.compressor.pool.elements.dtype == FLOAT8[cache_dtype]
            outputs[kind] = [
                llm.generate(PROMPTS, 36, extra_args={"kv_compress": name})
                for name in ("cake", "caote", "tova")
            ]
    assert outputs["tiles"] == outputs["vectors"]


def test_outputs_depend_on_the_own_prompt_only(models, async_scheduling_allowed):
    """Outputs do not depend on the batch, chunks, the prefix cache or async scheduling."""
    config, model = settings("cake", 0.4), models["fp8"]
    with engine(
        model, additional_config=config, kv_cache_dtype="fp8", enable_prefix_caching=False
    ) as llm:
        free = llm.free_blocks
        solo_outputs = [llm.generate([prompt], NEW)[0] for prompt in PROMPTS]
        assert llm.free_blocks == free
        assert llm.compressor.compressed == sum(length >= 128 for length in LENGTHS)
    concurrent = dict(max_num_batched_tokens=64, max_num_seqs=8, async_scheduling=True)
    with engine(model, additional_config=config, kv_cache_dtype="fp8", **concurrent) as llm:
        assert llm.generate(PROMPTS, NEW) == solo_outputs
        assert llm.generate(PROMPTS[::-1], NEW) == solo_outputs[::-1]
