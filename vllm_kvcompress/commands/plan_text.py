"""A forecast as a table."""

from rich.console import Console
from rich.table import Table

from vllm_kvcompress.commands.concurrency import Concurrency, Forecast, Worst
from vllm_kvcompress.commands.gpu_memory import LARGE_GPU_GIB, Defaults, Estimate


def show_forecast(
    found: Forecast, title: str, console: Console, *, estimated: bool = False
) -> None:
    """Print what a request takes off and compressed, and how many fit.

    Args:
        estimated: the pool's size is an estimate.
    """
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
        _add_pool(table, found.pool_off, found.pool_on, " (estimated)" if estimated else "")
    console.print(table)
    for line in _notes(found):
        console.print(line, highlight=False)


def _add_pool(table: Table, off: Concurrency, on: Concurrency, mark: str) -> None:
    table.add_row(f"memory of the pool{mark}", size(off.pool_bytes), size(on.pool_bytes), "")
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
    if found.worst is not None:
        notes.append(_worst(found, found.worst))
    if found.pool_on is None:
        notes.append(
            "How many fit depends on the pool: pass --kv-memory GIB, what vLLM's log calls"
            " available KV cache memory, or --gpu-memory GIB for an estimate."
        )
    elif found.pool_on.decoding == found.pool_on.most:
        notes.append(f"More would fit; {found.pool_on.most:,} is --max-num-seqs.")
    return notes


def _worst(found: Forecast, worst: Worst) -> str:
    blocks = worst.blocks
    line = (
        f"The most that a request may ask for ({worst.asks}) is {blocks.end:,} blocks,"
        f" {size(blocks.end * found.block_bytes)}"
    )
    if worst.pool is None:
        return f"{line}."
    return f"{line}: if all ask for that, {worst.pool.decoding:,} decode at once."


def default_line(device: str, gpu_gib: float | None, defaults: Defaults) -> str:
    """What --max-num-seqs was taken to be, since it was not given."""
    if device == "cpu":
        return f"--max-num-seqs {defaults.max_num_seqs}, as vLLM's server takes it on a CPU."
    of = f"of {gpu_gib:g} GiB" if gpu_gib is not None else f"of {LARGE_GPU_GIB} GiB and more"
    return (
        f"--max-num-seqs {defaults.max_num_seqs}, as vLLM takes it on GPUs {of}; on an A100 or a"
        f" GB10, and below {LARGE_GPU_GIB} GiB, it takes 256."
    )


def estimate_line(found: Estimate) -> str:
    """How the pool's size was estimated."""
    return (
        f"The pool is an estimate: {found.utilization:g} of {size(found.gpu_bytes)}, less"
        f" {size(found.weights_bytes)} of weights (from {found.weights_source}) and about"
        f" {size(found.working_bytes)} to work in. vLLM measures it when it starts: give what it"
        " logs as --kv-memory."
    )


def _times(more: int, less: int) -> str:
    return f"{more / less:.1f}x" if less and more != less else ""


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"
