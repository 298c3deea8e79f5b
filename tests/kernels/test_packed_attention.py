"""Attention over packed groups and ordinary pages equals the float64 reference."""

import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib import import_module, reload
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvcompress_kernels
from cases import INTERPRETED, KERNELS_RUN, ON_GPU, property_test
from kvcompress_kernels import k4v3
from kvcompress_kernels.packed_attention import Offsets, packed_attention, reference
from kvcompress_kernels.packed_attention.scratch import workspace
from paging import amx_tiles, transposed_keys

pytestmark = pytest.mark.gpu

prop = property_test(60, interpreted=12)
i32 = torch.int32

LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "LHBNC", "BHLNC")
"""Orders of layer, block, head, token and element in memory; see the page pool."""
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-3}
"""Largest error relative to the largest output. The CPU code computes in float32."""

SIZES = (
    (64, torch.bfloat16, torch.bfloat16),
    (80, torch.bfloat16, torch.bfloat16),
    (96, torch.float16, torch.float16),
    (64, torch.float32, torch.float32),
    (128, torch.float8_e4m3fn, torch.bfloat16),
    (256, torch.float8_e5m2, torch.float16),
)
"""Head dims with dtypes of the cache and of the query. Numba takes 16 seconds for each."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a batch: one entry per row in `packed`, `ordinary` and `queries`."""

    packed: tuple[int, ...] = (200,)
    ordinary: tuple[int, ...] = (40,)
    queries: tuple[int, ...] = (1,)
    group: int = 3
    kv_heads: int = 2
    dim: int = 64
    block: int = 32
    layout: str = "LBHNC"
    cache: torch.dtype = torch.bfloat16
    dtype: torch.dtype = torch.bfloat16
    spare_rows: int = 0


class Batch:
    """Random tensors of a batch. Unused memory of the cache holds NaN."""

    def __init__(self, shape: Shape, *, seed: int = 0, logits: float = 1.0) -> None:
        torch.manual_seed(seed)
        self.shape, block = shape, shape.block
        count = len(shape.packed)
        rows, size = count + shape.spare_rows, shape.cache.itemsize
        width = max(1, *(-(-n // block) for n in shape.ordinary))
        per_page = k4v3.page_tokens(block, size)
        columns = max(1, *(-(-n // per_page) for n in shape.packed))
        self.pages, ids = self._pool(count * (width + columns) + 3)
        tables, packed = ids[: count * width].view(count, width), ids[count * width :]
        # Views of wider tensors, because the op must not assume dense ones.
        self.tables = torch.full((rows, width + 2), 2**30, dtype=i32)[:, :width]
        self.tables[:count] = tables
        slots = torch.randperm(count + 2)[:count]
        self.packed = torch.full((count + 2, 2, columns), 2**30, dtype=i32)[:, 1]
        self.packed[slots] = packed[: count * columns].view(count, columns).int()
        self.packed_tokens = torch.full((count + 2, 2), 64, dtype=i32)[:, 1]
        self.packed_tokens[slots] = torch.tensor(shape.packed, dtype=i32)
        self.slots = torch.zeros(rows + 1, dtype=i32)
        self.slots[:count] = slots.int()
        self.lengths = torch.full((rows,), 9999, dtype=i32)
        self.lengths[:count] = torch.tensor(shape.ordinary, dtype=i32)
        ends = torch.tensor([0, *shape.queries]).cumsum(0).int()
        self.query_start = torch.nn.functional.pad(ends, (0, rows - count), value=int(ends[-1]))
        self.live = torch.tensor(count, dtype=i32)
        total, heads = int(ends[-1]), shape.group * shape.kv_heads
        fused = torch.randn(total, heads + 2, shape.dim + 8).to(shape.dtype) * logits
        self.query = fused[:, 1:-1, : shape.dim]
        self.output = torch.full((total + 1, heads, shape.dim), 7.0, dtype=shape.dtype)[:total]
        for row in range(count):
            self._fill_packed(self.packed[slots[row]], shape.packed[row])
            self._fill_ordinary(self.tables[row], shape.ordinary[row])

    def _pool(self, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the flat pages of a pool of two layers, and the second layer's page ids."""
        s = self.shape
        sizes = dict(zip("LBHNC", (2, blocks, s.kv_heads, s.block, 2 * s.dim), strict=True))
        store = torch.empty([sizes[axis] for axis in s.layout], dtype=s.cache)
        store.view(torch.uint8).fill_(0xFF)  # NaN in every dtype
        layers = store.permute([s.layout.index(axis) for axis in "LBHNC"])
        step = min(layers.stride(0), layers.stride(1))
        number = (layers.stride(0) + (blocks - 1) * layers.stride(1)) // step + 1
        pages = layers.as_strided((number, *layers.shape[2:]), (step, *layers.stride()[2:]))
        ids = layers.stride(0) // step + torch.randperm(blocks) * (layers.stride(1) // step)
        return pages, ids.int()

    def _fill_packed(self, row: torch.Tensor, tokens: int) -> None:
        s = self.shape
        rows = k4v3.rows_per_group(s.cache.itemsize)
        content = self.pages.view(torch.uint8)
        groups = s.block // rows
        offset = torch.randn(s.kv_heads, 1, s.dim) * 3  # some key channels are large in every token
        for index, first in enumerate(range(0, tokens, k4v3.GROUP)):
            keys = torch.randn(s.kv_heads, k4v3.GROUP, s.dim) + offset
            values = torch.randn(s.kv_heads, k4v3.GROUP, s.dim)
            used = min(k4v3.GROUP, tokens - first)
            group = k4v3.quantise(keys, values, used)
            group.value_scale[:, used:] = torch.nan
            group.value_minimum[:, used:] = torch.nan
            data = k4v3.to_bytes(group).unflatten(1, (rows, -1))
            start = index % groups * rows
            content[row[index // groups], :, start : start + rows] = data

    def _fill_ordinary(self, row: torch.Tensor, tokens: int) -> None:
        s = self.shape
        for column, first in enumerate(range(0, tokens, s.block)):
            used = min(s.block, tokens - first)
            data = torch.randn(s.kv_heads, used, 2 * s.dim)
            self.pages[row[column], :, :used] = data.to(s.cache)

    def arguments(self, output: torch.Tensor, offsets: Offsets | None = None) -> list[object]:
        return [
            self.query, output, self.pages, offsets, self.packed, self.packed_tokens, self.tables,
            self.lengths, self.query_start, self.slots, self.live,
        ]  # fmt: skip

    def rows(self, *, unpacked: bool) -> torch.Tensor:
        """Return the query tokens of the rows that have packed tokens, or of the other rows."""
        tokens = torch.arange(len(self.query)).split(self.shape.queries)
        rows = [x for x, n in zip(tokens, self.shape.packed, strict=True) if (n == 0) == unpacked]
        return torch.cat([*rows, tokens[0][:0]])

    def run(self, offsets: Offsets | None = None, **options: object) -> torch.Tensor:
        """Return the op's output."""
        output = self.output.clone()
        scale = self.shape.dim**-0.5
        longest = max(self.shape.queries)
        arguments = self.arguments(output, offsets)
        packed_attention(*arguments, scale=scale, max_query_tokens=longest, **options)
        return output

    def check(
        self, offsets: Offsets | None = None, tolerance: float | None = None, **options: object
    ) -> torch.Tensor:
        """Compare with the reference, and return the output."""
        got = self.run(offsets, **options)
        want = self.output.double()
        options.pop("workspace", None)
        reference.run(*self.arguments(want, offsets), scale=self.shape.dim**-0.5, **options)
        unpacked, rows = self.rows(unpacked=True), self.rows(unpacked=False)
        assert torch.equal(got[unpacked], self.output[unpacked])
        if tolerance is None:
            tolerance = TOLERANCE[self.shape.dtype]
            if not INTERPRETED and not ON_GPU and self.shape.dtype == torch.float32:
                tolerance = 1e-5
        error = (got[rows].double() - want[rows]).abs()
        bound = tolerance * want[rows].abs().amax() if len(rows) else 0
        assert (error <= bound).all(), float(error.max() / bound)
        return got


def run_of(count: int) -> st.SearchStrategy:
    """Return tuples of packed tokens, ordinary tokens and query tokens of one row."""
    packed = st.sampled_from([0, 1, 63, 64, 65, 200, *([] if INTERPRETED else [1000])])
    ordinary = st.sampled_from([1, 15, 16, 17, *([70] if INTERPRETED else [300])])
    queries = st.sampled_from([1, 2, 5, *([] if INTERPRETED else [40])])
    rows = st.tuples(packed, ordinary, queries)
    return st.lists(rows, min_size=1, max_size=count)


BATCHES = {
    "group": st.integers(1, 8),
    "kv_heads": st.integers(1, 3),
    "spare_rows": st.integers(0, 2),
}
BATCHES |= {"block": st.sampled_from([32, 128]), "layout": st.sampled_from(LAYOUTS)}


@prop
@given(
    run_of(2 if INTERPRETED else 4),
    st.fixed_dictionaries(BATCHES),
    st.sampled_from(SIZES),
    st.integers(0, 2**31 - 1),
    st.booleans(),
)
def test_batches_match_the_reference(rows, batch, sizes, seed, sinks):
    dim, cache, dtype = sizes
    packed, ordinary, queries = zip(*rows, strict=True)
    ordinary = tuple(max(n, q) for n, q in zip(ordinary, queries, strict=True))
    batch |= {"packed": packed, "ordinary": ordinary, "queries": queries}
    shape = Shape(**batch, dim=dim, cache=cache, dtype=dtype)
    options = {"sinks": torch.randn(shape.group * shape.kv_heads) * 3} if sinks else {}
    if cache.itemsize == 1:
        options |= {"key_scale": 0.5, "value_scale": 1.5}
    Batch(shape, seed=seed).check(**options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_cache_layout(layout):
    shape = Shape(packed=(130, 0, 64), ordinary=(33, 5, 64), queries=(1, 1, 1), layout=layout)
    Batch(shape).check()


@pytest.mark.parametrize("dim", [72, 160, 192])
def test_bytes_of_value_codes_that_are_read_at_once(dim, triton_runs):
    """1 byte for a head dim of 72, and 4 for 160 and 192. `SIZES` has head dims with 2."""
    Batch(Shape(packed=(130,), ordinary=(20,), queries=(2,), dim=dim)).check()


@pytest.mark.parametrize("packed", [1, 15, 17, 48, 64])
def test_warps_without_tokens(packed):
    """Each warp of the Triton kernel attends to 16 tokens of a group."""
    Batch(Shape(packed=(packed,), ordinary=(1,), queries=(1,), kv_heads=1)).check()


@pytest.mark.parametrize("block", [16, 48])
def test_blocks_of_other_sizes(block):
    """Blocks of 16 hold one group, and chunks of 64 ordinary tokens cross blocks of 48."""
    Batch(Shape(packed=(300, 65), ordinary=(150, 49), queries=(1, 3), block=block)).check()


def test_reference_equals_attention_over_the_tokens_in_order():
    """Packed tokens come first, and ordinary tokens are causal."""
    shape = Shape(packed=(70,), ordinary=(40,), queries=(5,), kv_heads=1, dtype=torch.float32)
    batch = Batch(shape)
    groups = k4v3.read_pages(
        batch.pages.view(torch.uint8), batch.packed[batch.slots[0], None].flatten().long(), 2
    )
    keys, values = (x.flatten(0, 3)[:70] for x in k4v3.dequantise(groups))
    rows = batch.pages[batch.tables[0].long()].flatten(0, 2)[:40].float()
    keys, values = torch.cat([keys, rows[:, :64]]), torch.cat([values, rows[:, 64:]])
    causal = torch.ones(5, 110, dtype=torch.bool).tril(105)
    want = torch.nn.functional.scaled_dot_product_attention(
        batch.query.transpose(0, 1), keys[None], values[None], attn_mask=causal
    )
    got = torch.zeros(5, 3, 64, dtype=torch.float64)
    reference.run(*batch.arguments(got), scale=64**-0.5)
    torch.testing.assert_close(got.float().transpose(0, 1), want, rtol=1e-5, atol=1e-5)


def half_rows(block, dim):
    """Return the offsets of all rows of K, then all rows of V."""
    t, d = torch.arange(block, dtype=i32) * dim, torch.arange(dim, dtype=i32)
    return Offsets(t, d, block * dim + t, d)


def scattered(block, dim):
    """Return offsets without runs of 16 elements."""
    t, d = torch.arange(block, dtype=i32), torch.arange(dim, dtype=i32)
    order = (t * 5) % block
    return Offsets(order, d * block, block * dim + order * dim, d * 7 % dim)


@pytest.mark.cpu
@pytest.mark.skipif(INTERPRETED, reason="the Triton kernel reads rows only")
@pytest.mark.parametrize("offsets", [amx_tiles, transposed_keys, half_rows, scattered])
@pytest.mark.parametrize(
    ("dim", "cache", "dtype"), [*SIZES[:4], SIZES[5], (88, torch.bfloat16, torch.bfloat16)]
)
def test_layouts_of_vllms_cpu_kernels(offsets, dim, cache, dtype):
    if dim % 16 and offsets is amx_tiles:
        pytest.skip("AMX tiles need a multiple of 16 head dims")
    rows = {"packed": (100, 0, 65), "ordinary": (300, 40, 47), "queries": (1, 1, 3)}
    shape = Shape(**rows, dim=dim, cache=cache, dtype=dtype)
    batch = Batch(shape)
    where = offsets(shape.block, dim)
    rows = [batch.tables[r, : -(-n // shape.block)] for r, n in enumerate(shape.ordinary)]
    for page in torch.cat(rows).tolist():  # unlike other layouts, this one has no unused tail
        data = torch.randn(shape.kv_heads, 2 * shape.block * dim).to(cache)
        batch.pages[page] = data.view(shape.kv_heads, shape.block, 2 * dim)
    batch.check(where)


@pytest.mark.parametrize("packed", [700] if INTERPRETED else [700, 3000])
def test_long_rows_are_split(packed, device):
    """A workspace is ready for the next call, and the same call gives the same bits."""
    shape = Shape(
        packed=(packed, 70, 0, 1100), ordinary=(700, 20, 3, 1), queries=(1,) * 4, kv_heads=1
    )
    batch = Batch(shape)
    memory = workspace(3, 1, 64, rows=6, device=device)
    got = batch.check(workspace=memory)
    other = Batch(replace(shape, packed=(1500,), ordinary=(600,), queries=(2,)))
    second = other.check(workspace=memory)
    assert torch.equal(batch.run(workspace=memory), got)
    assert torch.equal(other.run(workspace=memory), second)
    assert torch.equal(batch.run(), got)


@pytest.mark.cpu
@pytest.mark.skipif(INTERPRETED, reason="splits of the Triton kernel depend on the batch's shapes")
def test_neither_batch_nor_threads_change_the_bits():
    shape = Shape(packed=(1500, 70, 2000), ordinary=(700, 20, 3), queries=(1, 5, 1))
    batch = Batch(shape)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(batch.run())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, results[0]) for x in results)
    batch.live.fill_(1)
    alone = batch.run()
    assert torch.equal(alone[:1], results[0][:1])
    assert torch.equal(alone[1:], batch.output[1:])


@pytest.mark.parametrize("queries", [(40,), (33, 1, 20)])
def test_rows_with_many_queries_are_tiled(queries):
    rows = {"packed": (100,) * len(queries), "ordinary": tuple(q + 20 for q in queries)}
    group = 7 if len(queries) == 1 else 2
    Batch(Shape(**rows, queries=queries, group=group, kv_heads=1)).check()


@pytest.mark.parametrize("output", [torch.bfloat16, torch.float16, torch.float32])
def test_output_may_have_another_dtype(output):
    if output == torch.float16 and not KERNELS_RUN:
        pytest.skip("the CPU code converts to float16 as in batches of float16")
    batch = Batch(Shape(packed=(70, 0), ordinary=(20, 9), queries=(2, 1)))
    batch.output = batch.output.to(output)
    batch.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logits", [0.0, 10.0, 30.0])
def test_large_logits(logits, dtype):
    """A factor of 30 makes logits of about 100."""
    shape = Shape(packed=(700, 64), ordinary=(90, 17), queries=(1, 1), cache=dtype, dtype=dtype)
    cpu = dtype == torch.float32 and not INTERPRETED and not ON_GPU
    Batch(shape, logits=logits).check(tolerance=1e-4 if cpu else None)


@pytest.mark.parametrize("sink", [-torch.inf, 0.0, 60.0])
def test_sinks(sink):
    shape = Shape(packed=(700, 64), ordinary=(90, 17), queries=(1, 2), kv_heads=1)
    batch = Batch(shape)
    got = batch.check(sinks=torch.tensor([sink, 1.0, sink]))
    if sink == -torch.inf:
        assert torch.equal(got[:, ::2], batch.run()[:, ::2])


def test_extreme_outputs_of_float16():
    """Outputs may be subnormal or close to the largest float16."""
    shape = Shape(packed=(1,), ordinary=(1,), dim=96, cache=torch.float16, dtype=torch.float16)
    batch = Batch(shape)
    batch.query[:] = 0
    content = batch.pages.view(torch.uint8)
    content[batch.packed[batch.slots[0], 0].item(), :, : k4v3.rows_per_group(2)] = 0
    for factor in (1e-6, 1e4):
        part = batch.pages[batch.tables[0, 0], :, 0]
        part[:] = (torch.randn(part.shape) * factor).half()
        want = part[:, None, 96:].expand(-1, 3, -1).reshape(1, 6, 96).double() / 2
        torch.testing.assert_close(batch.run(), want.half(), rtol=1e-3, atol=6e-8)


def test_pages_beyond_2_to_the_31_elements():
    """Only touched memory of the cache is ever allocated on a CPU."""
    batch = Batch(Shape(packed=(70,), ordinary=(20,), queries=(1,), kv_heads=1))
    want = batch.run()
    store = torch.empty(3 * 2**30, dtype=torch.bfloat16)
    large = store.as_strided((3, *batch.pages.shape[1:]), (2**30, *batch.pages.stride()[1:]))
    large[1] = batch.pages[batch.tables[0, 0]]
    large[2] = batch.pages[batch.packed[batch.slots[0], 0]]
    batch.pages = large
    batch.tables[0, 0] = 1
    batch.packed[batch.slots[0], 0] = 2
    assert torch.equal(batch.run(), want)


def test_inside_a_cuda_graph(gpu):
    """Capture with one row, then replay with other tokens."""
    batch = Batch(Shape(packed=(700, 64), ordinary=(90, 17), queries=(1, 1)))
    names = ("query", "pages", "packed", "packed_tokens", "tables", "lengths")
    names += ("query_start", "slots", "live")
    for name in names:
        setattr(batch, name, getattr(batch, name).to(gpu))
    batch.output = batch.output.to(gpu)
    memory = workspace(6, 2, 64, rows=2, device=gpu)
    output = batch.output.clone()
    options = {"scale": 0.125, "max_query_tokens": 1, "workspace": memory}
    packed_attention(*batch.arguments(output), **options)  # compiles the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed_attention(*batch.arguments(output), **options)
    for tokens in (65, 0, 700):
        batch.packed_tokens[batch.slots[0].long()] = tokens
        output.copy_(batch.output)
        graph.replay()
        want = batch.output.clone()
        packed_attention(*batch.arguments(want), **options)
        assert torch.equal(output, want)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"query": torch.zeros(2, 6, 64, dtype=torch.float64)}, "query must be one of"),
        ({"query": torch.zeros(6, 64)}, r"query must be \[T, Hq, D\]; got"),
        ({"output": torch.zeros(2, 6, 32)}, r"output must be \[2, 6, 64\]; got \(2, 6, 32\)"),
        ({"pages": torch.zeros(3, 2, 32, 128, dtype=torch.uint8)}, "got torch.uint8"),
        ({"pages": torch.zeros(3, 2, 32, 64)}, "2 \\* D|128"),
        ({"pages": torch.zeros(3, 4, 32, 128)}, "multiple of Hkv=4; got 6"),
        ({"pages": torch.zeros(3, 2, 24, 128).bfloat16()}, "blocks of a multiple of 16"),
        ({"packed": torch.zeros(3, 4)}, "packed must be .* int32"),
        ({"packed_tokens": torch.zeros(3, 1, dtype=i32)}, "packed_tokens must be .* int32"),
        ({"tables": torch.zeros(3, 4, dtype=i32)}, r"tables must be \[2, 4\] int32"),
        ({"lengths": torch.zeros(2)}, r"lengths must be \[2\] int32"),
        ({"query_start": torch.zeros(2, dtype=i32)}, "at least 3 elements"),
        ({"slots": torch.zeros(1, dtype=i32)}, "at least 2 elements"),
        ({"live": torch.zeros(1, dtype=i32)}, r"live must be \[\] int32"),
        ({"sinks": torch.zeros(5)}, r"sinks must be \[6\] float32"),
        ({"max_query_tokens": 0}, "max_query_tokens must be positive; got 0"),
        ({"workspace": torch.zeros(8)}, "workspace must hold"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_arguments_are_checked(change, rule):
    good = {name: torch.zeros(2, 6, 64) for name in ("query", "output")}
    shapes = {"packed": (3, 4), "packed_tokens": (3,), "tables": (2, 4), "slots": (2,)}
    good |= {name: torch.zeros(shape, dtype=i32) for name, shape in shapes.items()}
    good |= {"lengths": torch.ones(2, dtype=i32), "query_start": torch.arange(3, dtype=i32)}
    good |= {"pages": torch.zeros(3, 2, 32, 128), "live": torch.tensor(2, dtype=i32)}
    good |= {"offsets": None, "scale": 1.0, "max_query_tokens": 1}
    packed_attention(**good)
    with pytest.raises(ValueError, match=rf"packed_attention: .*({rule})"):
        packed_attention(**good | change)


def test_offsets_are_checked():
    batch = Batch(Shape(layout="LBNHC"))
    where = half_rows(32, 64)
    rule = "offsets must be None" if INTERPRETED or ON_GPU else "must be contiguous"
    with pytest.raises(ValueError, match=rule):
        batch.run(where)
    if INTERPRETED or ON_GPU:
        return
    batch = Batch(Shape())
    with pytest.raises(ValueError, match=r"offsets.key_dims must be contiguous int32 \[64\]"):
        batch.run(where._replace(key_dims=where.key_tokens))


@pytest.mark.cpu
@pytest.mark.skipif(INTERPRETED, reason="the Triton kernel needs no numba")
def test_missing_numba_is_named(monkeypatch):
    module = import_module("kvcompress_kernels.compiling_numba")
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ImportError, match="pip install numba"):
        reload(module)


@pytest.mark.cpu
@pytest.mark.skipif(INTERPRETED, reason="the Triton kernel needs no numba")
def test_vllm_can_search_the_modules_of_the_compiler():
    """Its search, when an engine starts, reads the `__dict__` of every object that has one."""
    import_module("kvcompress_kernels.packed_attention.kernel_numba")
    from llvmlite.binding import ffi

    assert not hasattr(ffi.lib, "__dict__")
    assert ffi.lib.LLVMPY_GetVersionInfo


@pytest.mark.cpu
@pytest.mark.skipif(INTERPRETED, reason="the Triton kernel needs no numba")
def test_a_layer_may_be_called_again_with_other_tensors():
    from kvcompress_kernels.packed_attention.cpu import LayerCall

    batch = Batch(Shape(packed=(200, 70), ordinary=(40, 8), queries=(1, 5)))
    tensors = batch.pages, None, batch.packed, batch.packed_tokens, batch.slots, batch.live
    scales = {"scale": batch.shape.dim**-0.5, "key_scale": 1.0, "value_scale": 1.0}
    layer = LayerCall(*tensors, batch.query.shape[1], **scales, sinks=None, scratch=None)
    for live in (2, 1):
        batch.live.fill_(live)
        batch.query = torch.randn_like(batch.query)
        batch.lengths, batch.tables = batch.lengths.clone(), batch.tables.clone()
        output = batch.output.clone()
        layer(batch.query, output, batch.tables, batch.lengths, batch.query_start, 5)
        assert torch.equal(output, batch.run())


@pytest.mark.cpu
@pytest.mark.skipif(INTERPRETED, reason="the Triton kernel needs no numba")
def test_compiles_without_a_writable_cache_folder():
    """Numba finds no cache folder for code that is in no file, either."""
    from kvcompress_kernels import compiling_numba

    scope: dict[str, object] = {}
    exec("def double(x):\n    return 2 * x", scope)
    assert compiling_numba.cached(compiling_numba.njit)(scope["double"])(21) == 42


@pytest.mark.cpu
@pytest.mark.skipif(INTERPRETED, reason="the Triton kernel needs no numba")
def test_a_changed_file_is_compiled_again_with_its_callers_in_other_files(tmp_path):
    """Numba's cache alone would return the caller's old code."""
    kernels = tmp_path / "kvcompress_kernels"
    shutil.copytree(Path(kvcompress_kernels.__file__).parent, kernels)
    callee, caller = kernels / "callee.py", kernels / "caller.py"
    header = "from kvcompress_kernels.compiling_numba import cached, njit\n"
    caller.write_text(
        f"{header}from kvcompress_kernels.callee import number\n\n"
        "@cached(njit)\ndef call():\n    return number()\n"
    )
    code = "from kvcompress_kernels.caller import call; print(call(), len(call.stats.cache_hits))"
    for number in (1, 2):
        callee.write_text(f"{header}\n@cached(njit)\ndef number():\n    return {number}\n")
        for hits in ("0", "1"):
            printed = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True)
            assert printed.split() == [str(number), hits]
