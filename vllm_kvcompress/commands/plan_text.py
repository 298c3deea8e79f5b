"""A forecast as a table."""

from rich.console import Console
from rich.table import Table

from vllm_kvcompress.commands.forecast import Concurrency, Forecast, InPieces, Worst
from vllm_kvcompress.commands.gpu_memory import LARGE_GPU_GIB, Defaults, Estimate


def show_forecast(
    forecast: Forecast,
    title: str,
    console: Console,
    *,
    estimated: bool = False,
    bounded: bool = False,
    lookahead: int = 0,
    stages: int = 1,
) -> None:
    """Print what a request takes off and compressed, and how many fit.

    Args:
        estimated: the pool's size is an estimate.
        bounded: an answer is packed again as it grows, so it may hold most before its end.
        lookahead: tokens of the answer that the prompt stays whole for.
        stages: of the pipeline; the figures are of one.
    """
    block, load = forecast.block_bytes, forecast.load
    console.print(title, style="bold", highlight=False)
    table = Table("per request", "off", "compressed", "")
    for column in table.columns[1:]:
        column.justify = "right"
    kept = round(forecast.kept_tokens)
    answer = f"blocks after {load.output:,} tokens of answer"
    prefill = "blocks in its prefill"
    if lookahead:
        prefill += f" and {lookahead} tokens of answer"
    if bounded:
        answer = f"most blocks in {load.output:,} tokens of answer"
    table.add_row(
        "tokens kept per layer",
        f"{load.prompt:,}",
        f"{kept:,}",
        f"{forecast.kept_tokens / load.prompt:.1%}",
    )
    for name, off, on in (
        (prefill, forecast.off.prefill, forecast.on.prefill),
        ("blocks while decoding", forecast.off.decoding, forecast.on.decoding),
        (answer, forecast.off.end, forecast.on.end),
        ("mean blocks while it answers", round(forecast.off.mean), round(forecast.on.mean)),
    ):
        table.add_row(name, f"{off:,}", f"{on:,}", _times(off, on))
    off_bytes, on_bytes = forecast.off.end * block, forecast.on.end * block
    table.add_row("the same in memory", size(off_bytes), size(on_bytes), "")
    if forecast.pool_off is not None and forecast.pool_on is not None:
        table.add_section()
        _add_pool(table, forecast.pool_off, forecast.pool_on, " (estimated)" if estimated else "")
    console.print(table)
    if lookahead and forecast.left_whole is None:
        console.print(_held(forecast, lookahead), highlight=False)
    for line in _notes(forecast, stages):
        console.print(line, highlight=False)


def _layers(forecast: Forecast, stages: int) -> str:
    if stages > 1:
        return f"all layers of a stage, of which there are {stages}"
    own = forecast.group
    if forecast.with_states:
        return f"{own} layers; states have blocks of their own"
    return "all layers" if own is None else f"{own} layers; windows have blocks of their own"


def _add_pool(table: Table, off: Concurrency, on: Concurrency, mark: str) -> None:
    table.add_row(f"memory of the pool{mark}", size(off.pool_bytes), size(on.pool_bytes), "")
    for name, before, after in (
        ("blocks in the pool", off.blocks, on.blocks),
        ("requests at once, all decoding", off.decoding, on.decoding),
        ("requests at once, one in its prefill", off.beside_prefill, on.beside_prefill),
    ):
        factor = "" if name.startswith("blocks") else _times(after, before)
        table.add_row(name, f"{before:,}", f"{after:,}", factor)


def _notes(forecast: Forecast, stages: int) -> list[str]:
    notes = []
    if forecast.left_whole is not None:
        notes.append(f"This prompt is left whole: {forecast.left_whole}.")
    if forecast.in_pieces is not None:
        notes.append(_in_pieces(forecast, forecast.in_pieces))
    notes.append(
        f"A block is {forecast.block_size} tokens in {_layers(forecast, stages)},"
        f" {size(forecast.block_bytes)} per GPU."
        " Requests that share a prompt's start hold less."
    )
    notes.append(
        f"Compression takes up to {size(forecast.extra_bytes)} per GPU beside the pool, of which"
        f" {size(forecast.table_bytes)} are tables: fewer --max-num-seqs make them smaller."
    )
    if forecast.pays_from is not None:
        notes.append(
            f"A page is a whole block, and the tail stays: at this budget prompts of"
            f" {forecast.pays_from:,} tokens and more give a block back."
        )
    elif forecast.with_states:
        notes.append(
            "A page is a whole block, and at this budget no length is sure to give one back."
        )
    if forecast.worst is not None:
        notes.append(_worst(forecast, forecast.worst))
    if forecast.pool_on is None:
        notes.append(
            "How many fit depends on the pool: pass --kv-memory GIB, what vLLM's log calls"
            " available KV cache memory, or --gpu-memory GIB for an estimate."
        )
    elif forecast.pool_on.decoding == forecast.pool_on.most:
        notes.append(f"More would fit; {forecast.pool_on.most:,} is --max-num-seqs.")
    return notes


def _held(forecast: Forecast, lookahead: int) -> str:
    on, output = forecast.on, forecast.load.output
    return (
        f"For {lookahead:,} of {output:,} tokens of its answer a request holds {on.looking:,}"
        f" blocks, not {on.decoding:,}. --kv-lookahead-yields says what gives way when the pool is"
        " short."
    )


def _in_pieces(forecast: Forecast, pieces: InPieces) -> str:
    line = (
        f"This prompt is packed piece by piece. A layer holds {pieces.held_tokens:,.0f} tokens"
        f" until its end, and then keeps {forecast.kept_tokens:,.0f}."
    )
    if pieces.held_tokens >= 2 * forecast.kept_tokens:
        return line
    lost = f"{line} What a piece drops is lost before the answer asks for it"
    if pieces.roomy is None:
        return f"{lost}: a smaller --kv-piece holds more."
    return f"{lost}: --kv-max-whole {pieces.roomy} would hold twice the budget."


def _worst(forecast: Forecast, worst: Worst) -> str:
    blocks = worst.blocks
    line = (
        f"The most that a request may ask for ({worst.asks}) is {blocks.end:,} blocks,"
        f" {size(blocks.end * forecast.block_bytes)}"
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


def estimate_line(memory: Estimate) -> str:
    """How the pool's size was estimated."""
    return (
        f"The pool is an estimate: {memory.utilization:g} of {size(memory.gpu_bytes)}, less"
        f" {size(memory.weights_bytes)} of weights (from {memory.weights_source}) and about"
        f" {size(memory.working_bytes)} to work in. vLLM measures it when it starts: give what it"
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
