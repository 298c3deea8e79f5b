"""Every preset keeps the same tokens in the engine as on plain tensors, in any batch."""

import pytest
import torch

from added_methods import installed, write_package
from checkpoints import SHAPES, make, tokens
from engines import BLOCK, V2, engine, model_runner_v1_only, settings
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.registry import PRESETS
from vllm_kvcompress.offline import compress
from vllm_kvcompress.planning import memory
from vllm_kvcompress.settings.config import CompressionConfig

NAME = "llama-gqa"
PRESET_NAMES = ["d2o", "chunkkv", "caote"] if V2 else list(PRESETS)
LENGTHS = [417, 256, 150, 90]
PROMPTS = [tokens(length, seed=60 + length) for length in LENGTHS]
NEW = 8
READS_COLUMN_SUMS = {
    name
    for name in PRESETS
    if Reads.COLUMN_SUMS in CompressionConfig.parse({"compress": name}).method.reads
}


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make(NAME, checkpoints_folder)


@pytest.fixture(scope="module")
def plain(model):
    with engine(model) as llm:
        return llm.generate(PROMPTS, NEW)


def record(llm) -> dict[int, list[tuple[torch.Tensor, ...]]]:
    """Return a dict that fills with each layer's attention inputs: queries, keys and values."""
    seen: dict[int, list[tuple[torch.Tensor, ...]]] = {}
    context = llm.worker.vllm_config.compilation_config.static_forward_context
    for layer in context.values():
        forward = layer.impl.forward

        def recording(attention, q, k, v, *args, forward=forward, impl=layer.impl, **kwargs):
            seen.setdefault(impl._layer, []).append((q.clone(), k.clone(), v.clone()))
            return forward(attention, q, k, v, *args, **kwargs)

        layer.impl.forward = recording
    return seen


def watch_selections(llm) -> list[list[torch.Tensor]]:
    """Return a list that fills with the positions kept in pages, per compression and layer."""

    def selected(done):
        counts = (done.counts * done.pack_request.plan.block_size).tolist()
        kept = zip(done.kept, counts, strict=True)
        return [positions[:, :count].long() for positions, count in kept]

    return llm.watch_packing(selected)


def pages_of(llm) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each layer's packed keys and values ``[Hkv, n, D]`` of the one compressed request."""
    pool, compressor = llm.compressor.pool, llm.compressor
    (slot,) = pool._slots.values()
    held = []
    for layer, count in enumerate(pool._num_packed[slot].tolist()):
        pages = pool._packed[slot, layer, :count].long()
        keys, values = compressor.packer.mover.read(pages)
        held.append((keys.permute(1, 0, 3, 2).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)))
    return held


def tail_of(llm) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each layer's keys and values ``[Hkv, BLOCK, D]`` of the prompt's tail block."""
    pool, compressor = llm.compressor.pool, llm.compressor
    (request,) = llm.running()
    last = llm.manager.req_to_blocks[request.request_id][request.num_prompt_tokens // BLOCK]
    held = []
    for layer in range(len(pool.layer_offset)):
        page = pool.flat_ids(layer, torch.tensor([last.block_id]))
        keys, values = compressor.packer.mover.read(page)
        held.append((keys[0].mT, values[0]))
    return held


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_every_layer_keeps_a_page_besides_its_tail(preset, model):
    """1,025 tokens in blocks of 128 at 0.1: 101 tokens besides the tail's one are less than a page.

    Every layer keeps a page, and no page of the last destination block is unused.
    """
    with engine(
        model, additional_config=settings(preset, 0.1), block_size=128, blocks=24,
        max_model_len=1536, max_num_batched_tokens=1536, max_num_seqs=1,
    ) as llm:  # fmt: skip
        llm.submit("r", tokens(1025, seed=9), NEW)
        while not llm.compressor.compressed:
            llm.step()
        pages = [keys.shape[1] // 128 for keys, _ in pages_of(llm)]
        (request,) = llm.running()
        assert pages == [1] * SHAPES[NAME].layers
        assert llm.num_blocks_held(request.request_id) == 2
        llm.drain()


VARIANTS = {name: {} for name in PRESET_NAMES}
if not V2:
    by_norm = {"aggregate": "max", "value_norm": True}
    VARIANTS["pyramidkv, maximum times value norms"] = {"scorer_params": by_norm}
    defensive = {"allocator": "cake", "scorer_params": {"aggregate": "defensive"}}
    VARIANTS["caote, defensive, with a variance"] = defensive
# Layers 1 and 2 reuse layer 0's ranking, so a batch of layers is only partly read.
VARIANTS["chunkkv, rankings reused"] = {"selector_params": {"reuse": 3}}
VARIANTS["d2o, only values merged"] = {"merge": "values"}
VARIANTS["custom, reads keys and values"] = {"scorer": "lagkv", "scorer_params": {"lag": 50}}


@pytest.mark.parametrize("preset", VARIANTS)
def test_engine_and_offline_keep_the_same_tokens(preset, model, plain, monkeypatch):
    """The engine computes the prompt in three chunks; offline gets all of it, layer by layer."""
    shape, prompt = SHAPES[NAME], PROMPTS[0]
    config = settings(preset.partition(",")[0], 0.4, **VARIANTS[preset])
    monkeypatch.setattr(memory, "_MIN_SCORED_TOKENS", 0)
    with engine(
        model, additional_config=config, max_num_batched_tokens=150, max_num_seqs=4,
        max_model_len=1024, enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        assert llm.compressor.packer.rows_per_launch(len(prompt)) == 2
        seen, selections = record(llm), watch_selections(llm)
        llm.submit("r", prompt, NEW)
        while not llm.compressor.compressed:
            llm.step()
        held, tails = pages_of(llm), tail_of(llm)
        got = next(iter(llm.drain().values()))
    assert got[0] == plain[0][0]
    q, k, v = (
        torch.stack(
            [
                torch.cat([part[which] for part in seen[layer]])[: len(prompt)]
                .view(len(prompt), -1, shape.head_dim)
                .transpose(0, 1)
                for layer in range(shape.layers)
            ]
        )
        for which in range(3)
    )
    full_block_tokens = len(prompt) // BLOCK * BLOCK
    want = compress(q, k, v, policy=config["kvcompress"], budget=0.4, page_size=BLOCK)
    for layer, (keys, values) in enumerate(held):
        packed = want.positions[layer][:, : keys.shape[1]]
        assert (want.positions[layer][:, keys.shape[1] :] >= full_block_tokens).all()
        assert torch.equal(selections[0][layer], packed)
        count = keys.shape[1]
        torch.testing.assert_close(keys, want.keys[layer][:, :count], rtol=1e-5, atol=1e-6)
        if preset != "d2o":  # D2O merges keys; the other methods only move them
            assert torch.equal(keys, k[layer].gather(1, packed[..., None].expand_as(keys)))
        torch.testing.assert_close(values, want.values[layer][:, :count], rtol=1e-5, atol=1e-6)
        tail = len(prompt) % BLOCK  # D2O merges tokens into the tail too
        for engine_tail, expected in zip(tails[layer], (want.keys, want.values), strict=True):
            expected_tail = expected[layer][:, count:]
            torch.testing.assert_close(engine_tail[:, :tail], expected_tail, rtol=1e-5, atol=1e-6)


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


@pytest.mark.skipif(V2, reason="test_invariance covers this runner")
@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_outputs_do_not_depend_on_batch_order_or_chunks(preset, model, plain, in_chunks):
    with engine(model, additional_config=settings(preset, 0.4), enable_prefix_caching=True) as llm:
        alone = [llm.generate([prompt], NEW)[0] for prompt in PROMPTS]
        assert [out[0] for out in alone] == [out[0] for out in plain]
        assert alone[-1] == plain[-1]  # shorter than min_prompt
        assert llm.compressor.compressed == 3
        assert llm.generate(PROMPTS[::-1], NEW) == alone[::-1]
        warm = llm.outputs(PROMPTS, NEW)
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
def test_column_sums_start_again_after_a_preemption(model):
    """Column sums of an interrupted prefill must not be counted twice."""
    prompt = PROMPTS[0]
    options = dict(
        additional_config=settings("h2o", 0.3), max_num_batched_tokens=100, max_num_seqs=4,
        max_model_len=1024,
    )  # fmt: skip
    with engine(model, **options) as llm:
        alone = llm.generate([prompt], NEW)[0]
        llm.submit("r", prompt, NEW)
        for _ in range(3):
            llm.step()
        assert llm.compressor._prefills
        assert llm.llm.reset_prefix_cache(reset_running_requests=True)
        assert next(iter(llm.drain().values())) == alone
        assert llm.compressor.compressed == 2
        assert not llm.compressor._prefills


@model_runner_v1_only
def test_d2o_merges_only_into_its_own_requests_tail(model):
    """The tail stays in place and merging rewrites it; no cached block may change."""
    first, second = PROMPTS[0], PROMPTS[0][:300]
    with engine(model, additional_config=settings("d2o", 0.3)) as llm:
        alone = [llm.generate([prompt], NEW)[0] for prompt in (first, second)]
    with engine(model, additional_config=settings("d2o", 0.3), max_num_seqs=4) as llm:
        assert llm.generate([first, second, first], NEW) == [*alone, alone[0]]
        hashed = torch.tensor([b.block_id for b in llm.pool.blocks if b.block_hash is not None])
        pages = llm.compressor.pool.pages
        flat = torch.cat([llm.compressor.pool.flat_ids(layer, hashed) for layer in range(4)])
        before = pages[flat].clone()
        llm.generate([first, second], 3)
        assert torch.equal(pages[flat], before)
