"""Every preset in the engine: what plain tensors keep, whatever else is in the batch."""

import pytest
import torch

from checkpoints import SHAPES, make, tokens
from engines import BLOCK, V2, engine, first_runner, settings
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.presets import PRESETS
from vllm_kvcompress.offline import compress
from vllm_kvcompress.planning.memory import layers_at_once
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.method_of import method_of

NAME = "llama-gqa"
PRESET_NAMES = ["d2o", "chunkkv", "caote"] if V2 else list(PRESETS)
LENGTHS = [417, 256, 150, 90]
PROMPTS = [tokens(length, seed=60 + length) for length in LENGTHS]
NEW = 8
WHOLE_PROMPT = {
    name
    for name in PRESETS
    if Reads.COLUMN_SUMS in method_of(CompressionConfig.parse({"compress": name})).reads
}


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make(NAME, checkpoints_folder)


@pytest.fixture(scope="module")
def plain(model):
    with engine(model) as llm:
        return llm.generate(PROMPTS, NEW)


def record(llm) -> dict[int, list[tuple[torch.Tensor, ...]]]:
    """Per layer, the queries, keys and values that its attention was called with."""
    seen: dict[int, list[tuple[torch.Tensor, ...]]] = {}
    context = llm.worker.vllm_config.compilation_config.static_forward_context
    for layer in context.values():
        forward = layer.impl.forward

        def recording(lay, q, k, v, *rest, forward=forward, impl=layer.impl, **named):
            seen.setdefault(impl._layer, []).append((q.clone(), k.clone(), v.clone()))
            return forward(lay, q, k, v, *rest, **named)

        layer.impl.forward = recording
    return seen


def watch_selections(llm) -> list[list[torch.Tensor]]:
    """Per compression, the positions that each layer kept in pages."""

    def selected(done):
        counts = (done.counts * done.todo.plan.block_size).tolist()
        kept = zip(done.kept, counts, strict=True)
        return [positions[:, :count].long() for positions, count in kept]

    return llm.watch_packing(selected)


def pages_of(llm) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer, the packed keys and values ``[Hkv, n, D]`` of the one compressed request."""
    pool, compressor = llm.compressor.pool, llm.compressor
    (slot,) = pool._slots.values()
    held = []
    for layer, count in enumerate(pool._num_packed[slot].tolist()):
        pages = pool._packed[slot, layer, :count].long()
        keys, values = compressor.packer.mover.read(pages)
        held.append((keys.permute(1, 0, 3, 2).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)))
    return held


def tail_of(llm) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer, keys and values ``[Hkv, BLOCK, D]`` of the block that holds the prompt's tail."""
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
def test_no_layer_is_left_with_its_tail_alone(preset, model):
    """1,025 tokens in blocks of 128 at 0.1: 101 tokens beside the tail's one are less than a page.

    Every layer keeps a page, and no page of the last destination block lies unused.
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
        assert llm.manager.num_blocks_held(request.request_id) == 2
        llm.drain()


KEEPING = {name: {} for name in PRESET_NAMES}
if not V2:
    by_norm = {"aggregate": "max", "value_norm": True}
    KEEPING["pyramidkv, the maximum by value norms"] = {"scorer_params": by_norm}
    defensive = {"allocator": "cake", "scorer_params": {"aggregate": "defensive"}}
    KEEPING["caote, defensive, beside a variance"] = defensive
# Here not all layers that are scored together are read: layer 0 ranks for 1 and 2.
KEEPING["chunkkv, rankings reused"] = {"selector_params": {"reuse": 3}}
KEEPING["d2o, values merged alone"] = {"merge": "values"}
KEEPING["custom, keys and values are read"] = {"scorer": "lagkv", "scorer_params": {"lag": 50}}


@pytest.mark.parametrize("preset", KEEPING)
def test_engine_and_offline_keep_the_same(preset, model, plain):
    """The prompt comes in three chunks; offline sees it whole, layer by layer."""
    shape, prompt = SHAPES[NAME], PROMPTS[0]
    config = settings(preset.partition(",")[0], 0.4, **KEEPING[preset])
    assert layers_at_once(1024, len(prompt)) == 2
    with engine(
        model, additional_config=config, max_num_batched_tokens=150, max_num_seqs=4,
        max_model_len=1024, enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        seen, made = record(llm), watch_selections(llm)
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
    whole = len(prompt) // BLOCK * BLOCK
    want = compress(q, k, v, policy=config["kvcompress"], budget=0.4, page_size=BLOCK)
    for layer, (keys, values) in enumerate(held):
        packed = want.positions[layer][:, : keys.shape[1]]
        assert (want.positions[layer][:, keys.shape[1] :] >= whole).all()
        assert torch.equal(made[0][layer], packed)
        count = keys.shape[1]
        torch.testing.assert_close(keys, want.keys[layer][:, :count], rtol=1e-5, atol=1e-6)
        if preset != "d2o":  # which merges keys: all others move them
            assert torch.equal(keys, k[layer].gather(1, packed[..., None].expand_as(keys)))
        torch.testing.assert_close(values, want.values[layer][:, :count], rtol=1e-5, atol=1e-6)
        tail = len(prompt) % BLOCK  # D2O folds tokens into it too
        for mine, theirs in zip(tails[layer], (want.keys, want.values), strict=True):
            theirs = theirs[layer][:, count:]
            torch.testing.assert_close(mine[:, :tail], theirs, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def in_chunks(model):
    """Answers to prompts that are computed in many steps, by the preset that requests ask for."""
    with engine(
        model, additional_config=settings(budget=0.4, allow_override="all"), max_num_seqs=4,
        max_num_batched_tokens=48, max_model_len=1024, enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        return {
            preset: llm.generate(PROMPTS, NEW, extra_args={"kv_compress": preset})
            for preset in PRESET_NAMES
        }


@pytest.mark.skipif(V2, reason="test_invariance shows it on this runner")
@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_alone_in_company_in_any_order_and_chunked(preset, model, plain, in_chunks):
    with engine(model, additional_config=settings(preset, 0.4), enable_prefix_caching=True) as llm:
        alone = [llm.generate([prompt], NEW)[0] for prompt in PROMPTS]
        assert [out[0] for out in alone] == [out[0] for out in plain]
        assert alone[-1] == plain[-1]  # under the threshold
        assert llm.compressor.compressed == 3
        assert llm.generate(PROMPTS[::-1], NEW) == alone[::-1]
        warm = llm.outputs(PROMPTS, NEW)
        assert [list(output.outputs[0].token_ids) for output in warm] == alone
        cached = [output.num_cached_tokens for output in warm]
        assert all(n == 0 for n in cached[:3]) == (preset in WHOLE_PROMPT)
        assert cached[3] > 0
    assert in_chunks[preset] == alone


@first_runner
def test_mixed_presets_in_one_batch_behave_as_alone(model):
    """Each request asks for its own, and the plan carries it."""
    prompt = PROMPTS[0]
    asks = {
        preset: {"kv_compress": preset, "kv_budget": 0.25 + 0.05 * (i % 4)}
        for i, preset in enumerate(PRESET_NAMES)
    }
    some = settings(allow_override="all")
    with engine(model, additional_config=some, enable_prefix_caching=False) as llm:

        def run(names):
            for name in names:
                llm.submit(name, prompt, NEW, extra_args=asks[name])
            return llm.drain()

        alone = {name: run([name])[name] for name in PRESET_NAMES}
        assert run(PRESET_NAMES) == alone
        assert run(PRESET_NAMES[::-1]) == alone
        assert len({tuple(answer) for answer in alone.values()}) > 1


@first_runner
def test_preempted_whole_prompt_statistics_start_again(model):
    """Column sums of a prefill that was cut short must not be counted twice."""
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


@first_runner
def test_d2o_merges_into_the_tail_of_its_own_request_only(model):
    """The tail stays in place: merging rewrites it, and no cached block may change."""
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
