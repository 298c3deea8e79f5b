"""A forecast as a table."""

from rich.console import Console
from rich.table import Table

from vllm_kvcompress.commands.concurrency import Concurrency, Forecast


def show_forecast(found: Forecast, title: str, console: Console) -> None:
    """Print what a request takes off and compressed, and how many fit."""
    block = found.block_bytes
    console.print(title, style="bold", highlight=False)
    table = Table("per request", "off", "compressed", "")
    for column in table.columns[1:]:
        column.justify = "right"
    kept = round(found.kept_tokens)
    table.add_row(
        "tokens kept per layer",
        f"{found.load.prompt:,}",
        f"{kept:,}",
        f"{found.kept_tokens / found.load.prompt:.1%}",
    )
    for name, off, on in (
        ("blocks in its prefill", found.off.prefill, found.on.prefill),
        ("blocks while decoding", found.off.decoding, found.on.decoding),
        (f"blocks after {found.load.output:,} tokens of answer", found.off.end, found.on.end),
    ):
        table.add_row(name, f"{off:,}", f"{on:,}", _times(off, on))
    off_bytes, on_bytes = found.off.end * block, found.on.end * block
    table.add_row("the same in memory", size(off_bytes), size(on_bytes), "")
    if found.pool_off is not None and found.pool_on is not None:
        table.add_section()
        _add_pool(table, found.pool_off, found.pool_on)
    console.print(table)
    for line in _notes(found):
        console.print(line, highlight=False)


def _add_pool(table: Table, off: Concurrency, on: Concurrency) -> None:
    table.add_row("memory of the pool", size(off.pool_bytes), size(on.pool_bytes), "")
    for name, before, after in (
        ("blocks in the pool", off.blocks, on.blocks),
        ("requests at once, all decoding", off.decoding, on.decoding),
        ("requests at once, one in its prefill", off.beside_prefill, on.beside_prefill),
    ):
        factor = "" if name.startswith("blocks") else _times(after, before)
        table.add_row(name, f"{before:,}", f"{after:,}", factor)


def _notes(found: Forecast) -> list[str]:
    notes = []
    if found.left_whole is not None:
        notes.append(f"This prompt is left whole: {found.left_whole}.")
    notes.append(
        f"A block is {found.block_size} tokens in all layers, {size(found.block_bytes)} per GPU."
        " Requests that share a prompt's start hold less."
    )
    notes.append(
        f"Compression takes up to {size(found.extra_bytes)} per GPU beside the pool, of which"
        f" {size(found.table_bytes)} are tables: fewer --max-num-seqs make them smaller."
    )
    if found.pool_off is None:
        notes.append(
            "How many fit depends on the pool: pass --kv-memory GIB, what vLLM's log calls"
            " available KV cache memory."
        )
    return notes


def _times(more: int, less: int) -> str:
    return f"{more / less:.1f}x" if less and more != less else ""


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"
