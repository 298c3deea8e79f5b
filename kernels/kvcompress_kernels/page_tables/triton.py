"""Triton kernel of `page_tables`. It fills persistent buffers and can run inside a CUDA graph.

The tables of 256 requests x 128 layers x 8192 columns are 1 GiB, but a step only reads the columns
that its lengths cover. So a program handles one request and a group of layers, and loops over the
columns that these layers need. Several programs share this loop: enough to fill the GPU with a
small batch, but few enough that a grid for the largest batch is cheap when most rows are unused.
One program per tile of the largest tables would launch 262,144 programs, most of which do nothing.
The layers of a group are the rows of one tile and share the request's block ids.

Rows from `live` on use the same code with counts of 0 and the null block 0.
"""

import torch
import triton
import triton.language as tl

from kvcompress_kernels.builds import Build

COLUMNS = 128
PROGRAMS = 4096
"""About two waves of 16 programs on each of an H200's 132 multiprocessors."""


# These arguments differ by batch. Triton would specialise for 1 and for multiples of 16.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["layers", "table_width", "splits", "block_stride"]
)
def _page_tables_kernel(  # type: ignore[no-untyped-def]
    block_table,  # [>= live, table_width]
    seq_lens,  # [>= live]
    packed,  # [slots, L, C]
    num_packed,  # [slots, L]
    first_block,  # [slots]
    layer_offset,  # [L]
    slots,  # [>= live]
    live,  # []
    tables,  # [L, rows, width]
    lengths,  # [L, rows]
    layers,
    width,
    table_width,
    splits,
    block_stride,
    s_block_table,
    s_packed_slot,
    s_packed_layer,
    s_num_packed,
    s_tables_layer,
    s_tables_row,
    s_lengths,
    BLOCK: tl.constexpr,
    LAYERS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write one request's lengths and a share of its table columns for a group of layers."""
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(0) % splits
    layer = (tl.program_id(0) // splits * LAYERS + tl.arange(0, LAYERS)).to(tl.int64)
    real = layer < layers
    used = row < tl.load(live)
    slot = tl.load(slots + row, mask=used, other=0).to(tl.int64)

    first = tl.load(first_block + slot, mask=used, other=0)
    tokens = tl.load(seq_lens + row, mask=used, other=0)
    owned = layer < tl.where(used, layers, 0)
    count = tl.load(num_packed + slot * s_num_packed + layer, mask=owned, other=0)
    offset = tl.load(layer_offset + layer, mask=real, other=0)
    length = tl.minimum(tokens + (count - first) * BLOCK, width * BLOCK)  # [LAYERS]
    if split == 0:
        tl.store(lengths + layer * s_lengths + row, length, mask=real)
    # A row of length 0 also writes its first tile, with the null block.
    needed = tl.minimum(tl.maximum(tl.cdiv(length, BLOCK), 1), width)
    needed = tl.where(real, needed, 0)

    from_packed = packed + slot * s_packed_slot + layer * s_packed_layer
    to_table = tables + layer * s_tables_layer + row * s_tables_row
    for start in range(split * COLUMNS, tl.max(needed), splits * COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        wanted = (start < needed)[:, None]  # constant along columns, so that stores stay wide
        is_packed = column < count[:, None]
        page = tl.load(from_packed[:, None] + column, mask=wanted & is_packed, other=0)
        source = column - count[:, None] + first
        source = tl.minimum(tl.maximum(source, 0), table_width - 1)
        ordinary = wanted & ~is_packed & owned[:, None]
        block = tl.load(block_table + row * s_block_table + source, mask=ordinary, other=0)
        page = tl.where(is_packed, page, block * block_stride + offset[:, None])
        tl.store(to_table[:, None] + column, page, mask=wanted & (column < width))


def run(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    packed: torch.Tensor,
    num_packed: torch.Tensor,
    first_block: torch.Tensor,
    layer_offset: torch.Tensor,
    block_stride: int,
    block_size: int,
    slots: torch.Tensor,
    live: torch.Tensor,
    out_tables: torch.Tensor,
    out_lengths: torch.Tensor,
) -> None:
    layers, rows, width = out_tables.shape
    if out_tables.numel() == 0:
        return
    config = _config(layers)
    groups = triton.cdiv(layers, config["LAYERS"])
    splits = max(1, min(triton.cdiv(width, COLUMNS), PROGRAMS // (rows * groups)))
    _page_tables_kernel[(splits * groups, rows)](
        block_table,
        seq_lens,
        packed,
        num_packed,
        first_block,
        layer_offset,
        slots,
        live,
        out_tables,
        out_lengths,
        layers,
        width,
        block_table.shape[1],
        splits,
        block_stride,
        block_table.stride(0),
        *packed.stride()[:2],
        num_packed.stride(0),
        *out_tables.stride()[:2],
        out_lengths.stride(0),
        BLOCK=block_size,
        **config,
    )


def _config(layers: int) -> dict[str, int]:
    """Return the configuration and launch options for a number of layers."""
    tile = min(8, int(triton.next_power_of_2(layers)))
    return {"LAYERS": tile, "COLUMNS": COLUMNS, "num_warps": 4}


def builds(sm: int) -> list[Build]:
    """Return the build for 32 layers and blocks of 16."""
    pointers = (
        *("block_table", "seq_lens", "packed", "num_packed", "first_block", "layer_offset"),
        *("slots", "live", "tables", "lengths"),
    )
    return [
        Build(
            name="page_tables",
            kernel=_page_tables_kernel,
            config={"BLOCK": 16, **_config(32)},
            types=dict.fromkeys(pointers, "*i32"),
            wide_loads=False,
        )
    ]
