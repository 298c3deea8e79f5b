"""An fp8 KV cache under compression: what is kept is what was cached, bit for bit, and scored so.

vLLM quantises with one scale per layer. The reference sees the keys and values that the attention
layers received, and quantises them itself.
"""

import pytest
import torch

from amx_layout import pretend_amx, pretend_no_amx
from checkpoints import SHAPES, make, tokens
from engines import BLOCK, V2, engine, first_runner, settings
from processor import needs_avx512
from quantised import FLOAT8, as_cached, scaled, scales
from test_added_pieces import ANSWER, BOUND, INTERVAL, Added
from test_added_pieces import piecewise as and_bounded
from test_methods import LENGTHS, NEW, PROMPTS, pages_of, record, watch_selections
from test_probes import PROBE, Guided
from test_prompts_in_pieces import PieceReplay
from test_prompts_in_pieces import piecewise as in_pieces
from vllm_kvcompress.engine.compression.tiled_mover import TiledMover
from vllm_kvcompress.methods.presets import PRESETS
from vllm_kvcompress.offline import compress

pytestmark = needs_avx512

MERGING = {name for name in PRESETS if PRESETS[name].merge}


@pytest.fixture(scope="module")
def models(checkpoints_folder, tmp_path_factory):
    """vLLM takes scales of e4m3 alone."""
    own = scaled("llama-gqa", checkpoints_folder, tmp_path_factory.mktemp("scaled"))
    return {"fp8": own, "fp8_e5m2": make("llama-gqa", checkpoints_folder)}


def quantise(replay, stored):
    dtype = FLOAT8[stored]
    for layer in range(replay.shape.layers):
        of_layer = scales(layer) if stored == "fp8" else (1.0, 1.0)
        for part, scale in zip("kv", of_layer, strict=True):
            for parts in (replay.parts, *getattr(replay, "behind", {}).values()):
                exact = torch.from_numpy(parts[layer, part])
                parts[layer, part] = as_cached(exact, scale, dtype).numpy()


@first_runner
@pytest.mark.parametrize("stored", FLOAT8)
def test_a_budget_of_everything_changes_nothing(stored, models):
    answers = []
    for config in ({}, {"additional_config": settings("cake", 1.0)}):
        with engine(models[stored], kv_cache_dtype=stored, **config) as llm:
            answers.append(llm.generate(PROMPTS, 12))
    assert answers[0] == answers[1]


METHODS = ["snapkv", "cake", "cake-chunk", "tova", "caote", "streamingllm"]


@pytest.mark.parametrize("stored", FLOAT8)
@pytest.mark.parametrize("method", METHODS[1:2] if V2 else METHODS)
def test_every_token_reads_what_the_reference_holds(method, stored, models):
    """A prompt in pieces: scored by what is cached, of its probes too, and read from there."""
    length, answer, shape = 531, 40, SHAPES["llama-gqa"]
    with engine(
        models[stored],
        kv_cache_dtype=stored,
        additional_config=in_pieces(method, **PROBE),
        max_num_seqs=4,
        max_model_len=1024,
        max_num_batched_tokens=70,
    ) as llm:
        assert llm.compressor.pool.elements.dtype == FLOAT8[stored]
        seen, free = llm.record_attention(), llm.free_blocks
        llm.submit("r", tokens(length, seed=5), answer)
        llm.drain()
        assert llm.free_blocks == free
    # what goes by positions needs no probe
    by = PieceReplay if method == "streamingllm" else Guided
    replay = by(method, shape, seen, length, int(length * 0.4))
    quantise(replay, stored)
    replay.to_the_end(length + answer)
    assert len(replay.packed_at) >= 3


def test_an_answer_goes_on_so(models):
    """Attention is added up from piece to piece and from interval to interval."""
    length, shape = 480, SHAPES["llama-gqa"]
    config = and_bounded("h2o", 0.4, decode_budget=BOUND, decode_interval=2 * INTERVAL)
    options = dict(max_num_seqs=4, max_model_len=1024, max_num_batched_tokens=70)
    with engine(models["fp8"], kv_cache_dtype="fp8", additional_config=config, **options) as llm:
        seen = llm.record_attention()
        llm.submit("r", tokens(length, seed=5), ANSWER)
        llm.drain()
    replay = Added("h2o", shape, seen, length, int(length * 0.4))
    replay.interval = 2 * INTERVAL
    quantise(replay, "fp8")
    for position in range(length + ANSWER - 1):
        replay.step(position)
    assert replay.boundaries[-1] == length
    assert replay.packed_at


WHOLE = sorted(PRESETS.keys() - MERGING)
PARTS = {"caote, budgets by its scores": {"allocator": "global"}}


@pytest.mark.parametrize("preset", ["cake"] if V2 else [*WHOLE, *PARTS])
def test_a_whole_prompt_keeps_what_was_cached(preset, models):
    """Chosen as plain tensors of these numbers are, and moved bit for bit."""
    shape, prompt = SHAPES["llama-gqa"], PROMPTS[0]
    config = settings(preset.partition(",")[0], 0.4, **PARTS.get(preset, {}))
    options = dict(max_num_batched_tokens=150, max_num_seqs=4, max_model_len=1024)
    with engine(models["fp8"], kv_cache_dtype="fp8", additional_config=config, **options) as llm:
        seen, made = record(llm), watch_selections(llm)
        llm.submit("r", prompt, NEW)
        while not llm.compressor.compressed:
            llm.step()
        held = pages_of(llm)
        llm.drain()
    parts = [
        torch.stack(
            [
                torch.cat([part[which] for part in seen[layer]])[: len(prompt)]
                .view(len(prompt), -1, shape.head_dim)
                .transpose(0, 1)
                for layer in range(shape.layers)
            ]
        )
        for which in range(3)
    ]
    for layer in range(shape.layers):
        for which, scale in zip((1, 2), scales(layer), strict=True):
            parts[which][layer] = as_cached(parts[which][layer], scale, FLOAT8["fp8"])
    want = compress(*parts, policy=config["kvcompress"], budget=0.4, page_size=BLOCK)
    for layer, cached in enumerate(held):
        count = cached[0].shape[1]
        assert torch.equal(made[0][layer], want.positions[layer][:, :count])
        for part, full, scale in zip(cached, (want.keys, want.values), scales(layer), strict=True):
            assert part.dtype == FLOAT8["fp8"]
            assert torch.equal(
                part.float(), (full[layer][:, :count] / scale).to(part.dtype).float()
            )


@first_runner
@pytest.mark.parametrize("stored", FLOAT8)
def test_tiles_of_bytes_answer_as_vectors_of_bytes(stored, models, monkeypatch):
    """AMX's layout, with neighbours and the prefix cache; answers that grow too."""
    answers = {}
    bounds = {"decode_budget": 64, "decode_interval": BLOCK}
    config = settings("cake", 0.3, allow_override="caote,tova", **bounds)
    for kind, pretend in (("vectors", pretend_no_amx), ("tiles", pretend_amx)):
        pretend(monkeypatch)
        options = dict(dtype="bfloat16", kv_cache_dtype=stored, max_num_seqs=4, max_model_len=1024)
        # a small pool, all of whose pages the stand-in of AMX's kernels copies for each layer
        with engine(models[stored], blocks=1 + 96, additional_config=config, **options) as llm:
            assert isinstance(llm.compressor.packer.mover, TiledMover) == (kind == "tiles")
            answers[kind] = [
                llm.generate(PROMPTS, 60, extra_args={"kv_compress": name})
                for name in ("cake", "caote", "tova")
            ]
    assert answers["tiles"] == answers["vectors"]


@first_runner
def test_an_answer_depends_on_its_own_tokens(models, keep_async_scheduling):
    """Not on its neighbours, chunks, the prefix cache or how steps are scheduled."""
    config, model = settings("cake", 0.4), models["fp8"]
    with engine(
        model, additional_config=config, kv_cache_dtype="fp8", enable_prefix_caching=False
    ) as llm:
        free = llm.free_blocks
        alone = [llm.generate([prompt], NEW)[0] for prompt in PROMPTS]
        assert llm.free_blocks == free
        assert llm.compressor.compressed == sum(length >= 128 for length in LENGTHS)
    crowd = dict(max_num_batched_tokens=64, max_num_seqs=8, async_scheduling=True)
    with engine(model, additional_config=config, kv_cache_dtype="fp8", **crowd) as llm:
        assert llm.generate(PROMPTS, NEW) == alone
        assert llm.generate(PROMPTS[::-1], NEW) == alone[::-1]
