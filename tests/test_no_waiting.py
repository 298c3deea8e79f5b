"""Methods choose pages and positions without syncing: the host never reads how much is kept."""

import pytest
import torch

from host_sync import no_uploads_or_reads
from kvcompress_kernels import contract
from kvcompress_kernels.apportion import apportion
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import (
    AttentionStats,
    BudgetSpec,
    LayerStats,
    PagedKeys,
    PagedValues,
)
from vllm_kvcompress.methods.method import round_to_pages
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.methods.published.keydiff import KeyDiff
from vllm_kvcompress.methods.published.lagkv import LagKV
from vllm_kvcompress.methods.registry import PRESETS
from vllm_kvcompress.settings.config import CompressionConfig

LAYERS, HEADS, KV_HEADS = 9, 4, 2
MORE_SETTINGS = {
    "d2o, layers skipped": {"compress": "d2o", "allocator_params": {"skip_layers": [0, -1]}},
    "d2o, heads scaled": {"compress": "d2o", "allocator_params": {"norm": "head_minmax"}},
    "chunks reused": {"compress": "chunkkv", "selector_params": {"reuse": 3, "shared": False}},
    "shared": {"compress": "cake", "selector_params": {"shared": True}},
    "global": {"compress": "snapkv", "allocator": "global"},
    "chunks of cake": {"compress": "cake", "selector": "chunks"},
}
SETTINGS = {**{name: {"compress": name} for name in PRESETS}, **MORE_SETTINGS}


def on_device(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def empty_observations(method, past):
    """Return empty layer observations with the fields that `Method.observe` returns."""
    stats = {}
    if Reads.VARIANCE in method.allocator.reads:
        stats = {"entropy": on_device(LAYERS), "shift": on_device(LAYERS)}
    elif Reads.COLUMN_SUMS in method.allocator.reads:
        stats = {"column_variance": on_device(LAYERS, HEADS)}
    return LayerStats(scores=on_device(LAYERS, KV_HEADS, past), **stats)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("tokens", [201, 1000])
def test_pages_and_positions_need_no_sync(name, tokens):
    """On meta tensors the ops run their CPU code, which must not read values either."""
    settings = CompressionConfig.parse({**SETTINGS[name], "budget": 0.4})
    method, plan = settings.method, page_plan(settings.budget_spec(LAYERS, tokens), 16)
    observations = empty_observations(method, plan.budget_spec.past)
    if method.allocator.reads:
        with no_uploads_or_reads():
            pages = method.layer_pages(plan, observations)
        assert pages.device.type == "meta"
    else:  # The page counts depend only on lengths.
        assert method.layer_pages(plan, observations).device.type == "cpu"
        pages = on_device(LAYERS, dtype=torch.int64)
    assert (pages.shape, pages.dtype) == ((LAYERS,), torch.int64)
    with no_uploads_or_reads():
        kept = method.select(observations, plan, pages)
        max_kept = plan.max_layer_pages * plan.block_size + plan.tail
        assert (kept.shape, kept.dtype) == ((LAYERS, KV_HEADS, max_kept), torch.int32)
        scores = method.protected_scores(observations, plan, pages)
        assert scores.shape == (LAYERS, KV_HEADS, tokens)


@pytest.mark.parametrize("scorer", [KeyDiff(), LagKV(lag=32)])
def test_key_and_value_scores_need_no_sync(scorer):
    prompt = {"pages": on_device(13, dtype=torch.int64), "tokens": 200}
    keys = PagedKeys(key_pages=on_device(20, KV_HEADS, 8, 16), **prompt)
    values = PagedValues(value_pages=on_device(20, KV_HEADS, 16, 8), **prompt)
    counts = {"num_kv_heads": KV_HEADS, "past": 168, "device": torch.device("meta")}
    stats = AttentionStats(**counts, keys=keys, values=values)
    with no_uploads_or_reads():
        scores = scorer.score(stats)
    assert (scores.shape, scores.dtype) == ((KV_HEADS, 168), torch.float32)


def test_integer_budgets_need_no_sync():
    weights, caps = on_device(3, LAYERS), on_device(3, LAYERS, dtype=torch.int64)
    plan = page_plan(BudgetSpec(num_layers=LAYERS, tokens=300, window=8, budget=100), 16)
    with no_uploads_or_reads():
        for total in (100, on_device(dtype=torch.int64)):
            budgets = apportion(weights, total, caps, 8)
            assert (budgets.shape, budgets.dtype) == (caps.shape, torch.int64)
        assert round_to_pages(budgets[0], plan).shape == (LAYERS,)


def test_meta_tensors_do_not_run_triton():
    assert not contract.runs_triton(on_device(1))
