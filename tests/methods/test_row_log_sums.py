"""`Method.attention` passes the log-sum-exp of the queries on to the kernel."""

import pytest
import torch

from vllm_kvcompress.methods import method as method_module
from vllm_kvcompress.methods.paged_layers import PagedLayers
from vllm_kvcompress.settings.config import CompressionConfig

ROWS, WINDOW, HEADS, TOKENS = 2, 8, 4, 64


@pytest.fixture
def passed(monkeypatch):
    """Return the log-sum-exps of each later call of the kernel, None where there are none."""
    recorded = []
    kernel = method_module.window_scores_of_rows

    def recording(*args, row_log_sums=None, **options):
        recorded.append(row_log_sums)
        return kernel(*args, **options)

    monkeypatch.setattr(method_module, "window_scores_of_rows", recording)
    return recorded


def attend(log_sums, allocator_window=None):
    layers = PagedLayers(
        key_pages=torch.randn(8, HEADS // 2, 16, 16),
        value_pages=torch.randn(8, HEADS // 2, 16, 16),
        pages=torch.arange(8).view(ROWS, 4),
        lengths=None,
        max_tokens=TOKENS,
        scale=0.25,
        layers=range(ROWS),
    )
    method = CompressionConfig.parse({"compress": "cake"}).method
    query = torch.randn(ROWS, WINDOW, HEADS, 16)
    method.attention(layers, query, allocator_window, row_log_sums=log_sums)


def test_log_sums_of_all_queries_reach_the_kernel(passed):
    log_sums = torch.randn(ROWS, HEADS, WINDOW)
    attend(log_sums)
    assert len(passed) == 1
    assert torch.equal(passed[0], log_sums)


def test_the_last_queries_decide_the_budgets(passed):
    log_sums = torch.randn(ROWS, HEADS, WINDOW)
    attend(log_sums, allocator_window=3)
    assert torch.equal(passed[0], log_sums)
    assert torch.equal(passed[1], log_sums[:, :, -3:])


def test_missing_log_sums_stay_none(passed):
    attend(None, allocator_window=3)
    assert passed == [None, None]
