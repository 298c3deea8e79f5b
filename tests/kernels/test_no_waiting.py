"""Ops launch kernels without syncing the host: they read and upload nothing (`waits`)."""

import importlib
import inspect
import os
from pkgutil import iter_modules

import pytest
import torch

import kvcompress_kernels
from host_sync import launches, no_uploads_or_reads
from kvcompress_kernels.apportion import apportion, apportion_by_preference, round_to_pages
from kvcompress_kernels.assign_pages import assign_pages
from kvcompress_kernels.column_sums import column_sums
from kvcompress_kernels.count_highest import count_highest
from kvcompress_kernels.dequantise_pages import dequantise_pages
from kvcompress_kernels.key_cosines import key_cosines_of_rows
from kvcompress_kernels.lag_scores import lag_scores_of_rows
from kvcompress_kernels.merge_evicted import merge_evicted
from kvcompress_kernels.move_kept import move_kept
from kvcompress_kernels.packed_attention import packed_attention
from kvcompress_kernels.packed_attention.scratch import workspace
from kvcompress_kernels.page_tables import page_tables
from kvcompress_kernels.quantise_kept import quantise_kept
from kvcompress_kernels.select import select, select_chunks
from kvcompress_kernels.value_norms import value_norms_of_rows
from kvcompress_kernels.value_scores import value_scores_of_rows
from kvcompress_kernels.window_scores import window_scores_of_rows

pytestmark = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="uses meta tensors")


@pytest.fixture
def launched(monkeypatch):
    return launches(monkeypatch)


def on_device(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def pages(dim, dtype=torch.bfloat16):
    """Return keys ``[40, Hkv, D, 16]`` and values ``[40, Hkv, 16, D]`` as in FLASH_ATTN."""
    cache = on_device(2, 40, 16, 2, dim, dtype=dtype)
    return cache[0].permute(0, 2, 3, 1), cache[1].transpose(1, 2)


K, V = pages(64)
QUERY = on_device(3, 32, 8, 64, dtype=torch.bfloat16)
TABLE = on_device(13, dtype=torch.int64)  # pages of 200 tokens
TABLES = on_device(3, 13, dtype=torch.int64)
KEPT = on_device(3, 2, 96, dtype=torch.int64)
COUNTS = on_device(3)
SCORES = on_device(6, 200, dtype=torch.float32)
WEIGHTS = on_device(3, 8, 200, dtype=torch.float32)
STEP = (on_device(5, 30), on_device(5), on_device(9, 4, 7), on_device(9, 4), on_device(9))
INTO = (on_device(5), on_device(), on_device(4, 8, 30), on_device(4, 8))

ROWS = on_device(5, 8, 64, dtype=torch.bfloat16), on_device(5, 8, 64, dtype=torch.bfloat16)
GROUPS = on_device(9, 7), on_device(9)


def packed(max_query_tokens, **options):
    """Run `packed_attention` on a batch of up to 5 rows."""
    flat = on_device(40, 2, 16, 128, dtype=torch.bfloat16)
    batch = on_device(5, 30), on_device(5), on_device(6), on_device(5), on_device()
    options |= {"scale": 0.1, "max_query_tokens": max_query_tokens}
    packed_attention(*ROWS, flat, None, *GROUPS, *batch, **options)


WHOLE = on_device(2, 9, dtype=torch.int64)
TAUS = {"tau1": 1.6, "tau2": 0.4}
PACKED = on_device(9, 4, 7), on_device(9, 4), on_device(9)


def assign(**options):
    """Run `assign_pages` on two requests."""
    requests, blocks = on_device(2, 3, dtype=torch.int64), on_device(5, dtype=torch.int64)
    assign_pages(requests, blocks, on_device(4), 1, on_device(2, 4), *PACKED, **options)


BYTES = on_device(40, 2, 16, 256, dtype=torch.uint8)
LOG_SUMS = on_device(3, 8, 32, dtype=torch.float32)
WINDOW_OPTIONS = [{"variance": False}, {"maximum": True}, {"maximum": True, "pooled": True}]
WINDOW_OPTIONS += [{"lengths": COUNTS}, {"row_log_sums": LOG_SUMS}]


CALLS = {
    "apportion": lambda: [
        apportion(weights, total, caps, 8)
        for weights in (WHOLE, WHOLE.double())
        for total in (100, WHOLE[:, :1], WHOLE[0, 0])
        for caps in (30, WHOLE)
    ],
    "apportion_by_preference": lambda: [
        apportion_by_preference(WHOLE.float(), WHOLE.float(), 100, caps, **TAUS)
        for caps in (30, WHOLE)
    ],
    "round_to_pages": lambda: [
        round_to_pages(WHOLE, pages=9, page_tokens=16, tail=-4, floor_pages=1, max_pages=caps)
        for caps in (30, WHOLE)
    ],
    "assign_pages": lambda: [
        assign(),
        assign(out_group_tokens=PACKED[1]),
        assign(group_tokens=on_device(2, 4), out_group_tokens=PACKED[1]),
    ],
    "column_sums": lambda: column_sums(QUERY[0], K, TABLE, 200, 0.1),
    "count_highest": lambda: [count_highest(SCORES, 300, every) for every in (2, 6)],
    "value_scores_of_rows": lambda: [
        value_scores_of_rows(WEIGHTS, V, TABLES, 200, lengths=lengths, fast=fast, reduce="l2")
        for lengths in (None, COUNTS)
        for fast in (False, True)
    ],
    "value_norms_of_rows": lambda: value_norms_of_rows(V, TABLES, 200),
    "key_cosines_of_rows": lambda: key_cosines_of_rows(K, TABLES, 200),
    "lag_scores_of_rows": lambda: lag_scores_of_rows(K, V, TABLES, 200, sinks=4, lag=30),
    "merge_evicted": lambda: merge_evicted(K, V, TABLES, 200, KEPT, COUNTS),
    "move_kept": lambda: [
        move_kept(K, V, TABLES, kept, COUNTS, on_device(3, 6), into=into)
        for kept in (None, KEPT)
        for into in (None, pages(64))
    ],
    "quantise_kept": lambda: [
        quantise_kept(K, V, TABLES, kept, COUNTS, on_device(3, 2), into=BYTES, key_scale=scale)
        for kept in (None, KEPT)
        for scale in (1.0, on_device(3, dtype=torch.float32))
    ],
    "select": lambda: [
        select(SCORES, on_device(6), on_device(6), 96, num_first=4, num_last=on_device(6)),
        select(SCORES, 200, on_device(6), 96),
    ],
    "select_chunks": lambda: [
        select_chunks(SCORES, on_device(3), on_device(3), 96, size=10, heads=2),
        select_chunks(SCORES, 200, on_device(6), 96, size=10),
    ],
    "packed_attention": lambda: [
        packed(1),
        packed(5, sinks=on_device(8, dtype=torch.float32)),
        packed(1, workspace=workspace(8, 2, 64, rows=5, device="meta")),
    ],
    "dequantise_pages": lambda: dequantise_pages(
        on_device(40, 2, 16, 128, dtype=torch.bfloat16), None, on_device(5), on_device(20)
    ),
    "page_tables": lambda: page_tables(*STEP, on_device(4), 4, 16, *INTO),
    "window_scores_of_rows": lambda: [
        window_scores_of_rows(QUERY, K, TABLES, 200, scale, **{"variance": True, **options})
        for scale in (0.1, -0.1, on_device(3, dtype=torch.float32))
        for options in WINDOW_OPTIONS
    ],
}
LAUNCHERS = {"run", "run_rows", "run_preferences", "run_pages", "chunks"}
"""Functions of the Triton modules that the public ops call."""


def functions(module):
    return {
        name
        for name, x in inspect.getmembers(module, inspect.isfunction)
        if x.__module__ == module.__name__ and not name.startswith("_") and name != "builds"
    }


def test_every_op_is_covered():
    ops = [module.name for module in iter_modules(kvcompress_kernels.__path__) if module.ispkg]
    packages = [importlib.import_module(f"kvcompress_kernels.{op}") for op in ops]
    assert set(CALLS) == {name for package in packages for name in functions(package)}
    for op in ops:
        module = importlib.import_module(f"kvcompress_kernels.{op}.triton")
        assert functions(module) <= LAUNCHERS, module


@pytest.mark.parametrize("call", CALLS)
def test_ops_read_and_upload_nothing(call, launched):
    with no_uploads_or_reads():
        CALLS[call]()
    assert launched


OF_ROWS = {
    "value_scores": (
        lambda weights, tables: value_scores_of_rows(
            weights, V, tables, 200, fast=False, reduce="mean"
        ),
        4,
    ),
    "value_norms": (lambda _, tables: value_norms_of_rows(V, tables, 200), 1),
    "key_cosines": (lambda _, tables: key_cosines_of_rows(K, tables, 200), 3),
    "lag_scores": (lambda _, tables: lag_scores_of_rows(K, V, tables, 200, sinks=4, lag=30), 2),
}
"""Ops that take rows of one length, and their number of launches."""


@pytest.mark.parametrize("op", OF_ROWS)
@pytest.mark.parametrize("rows", [1, 5])
def test_number_of_launches_does_not_depend_on_the_rows(rows, op, launched):
    run, num_launches = OF_ROWS[op]
    run(on_device(rows, 8, 200, dtype=torch.float32), on_device(rows, 13, dtype=torch.int64))
    assert len(launched) == num_launches


@pytest.mark.parametrize(("layers", "every"), [(1, 1), (5, 5), (80, 1)])
def test_number_of_launches_does_not_depend_on_the_updates(layers, every, launched):
    """Each of the four digits takes two launches."""
    count_highest(on_device(layers, 200, dtype=torch.float32), 20, every)
    assert len(launched) == 8


WAITS = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool(x[0]),
    "index": lambda x: range(x[0]),
    "tolist": lambda x: x.tolist(),
    "builtin max": max,
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "repeat": lambda x: torch.repeat_interleave(x),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "equal": lambda x: torch.equal(x, x + 1),
    "tensor": lambda x: torch.tensor([1, 2], device=x.device),
    "as_tensor": lambda x: torch.as_tensor([1, 2], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1, 2]),
    "to": lambda x: torch.arange(3).to(x.device),
    "copy": lambda x: x.copy_(torch.arange(3)),
    "store": lambda x: x.__setitem__(0, torch.tensor(1)),
}


@pytest.mark.parametrize("wait", WAITS)
def test_syncs_are_detected(wait):
    with (
        no_uploads_or_reads(),
        pytest.raises((AssertionError, NotImplementedError, RuntimeError, TypeError)),
    ):
        WAITS[wait](on_device(3))


def test_operations_on_the_device_are_allowed():
    x = on_device(3, 4)
    with no_uploads_or_reads():
        torch.full((1,), 7, device=x.device)
        torch.arange(0, 8, 4, device=x.device)
        x.to(torch.float32).cumsum(1)[None, :2].contiguous().zero_()
