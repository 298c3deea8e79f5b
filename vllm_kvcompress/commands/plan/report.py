"""Text output of ``kvcompress plan``: a table and notes."""

from rich.console import Console
from rich.table import Table

from vllm_kvcompress.commands.plan.forecast import Concurrency, Forecast, InPieces, WorstCase
from vllm_kvcompress.commands.plan.gpu_memory import LARGE_GPU_GIB, Defaults, Estimate
from vllm_kvcompress.methods.registry import RECOMMENDED, RECOMMENDED_BUDGETS, RECOMMENDED_MEMORY

_WASTEFUL = 1.1
"""Kept tokens per token of the budget from which the block size wastes memory."""


def show_forecast(
    forecast: Forecast,
    title: str,
    console: Console,
    *,
    estimated: bool = False,
    packs_outputs: bool = False,
    stages: int = 1,
) -> None:
    """Print the blocks and memory of a request, without and with compression, and how many fit.

    Args:
        estimated: whether the pool size is an estimate.
        packs_outputs: whether outputs are packed too, so that a request may hold the most blocks
            before its end.
        stages: pipeline-parallel size. The figures are of one stage.
    """
    block, load = forecast.block_bytes, forecast.load
    console.print(title, style="bold", highlight=False)
    auto = forecast.auto
    compressed = ["compressed"] if auto is None else ["auto", forecast.packed_dtype]
    table = Table("per request", "off", *compressed, "")
    for column in table.columns[1:]:
        column.justify = "right"
    on = [forecast] if auto is None else [auto, forecast]
    end_row = f"blocks after {load.output:,} output tokens"
    prefill_row = "blocks during prefill"
    if any(each.lookahead for each in on):
        prefill_row += " and look-ahead"
    memory_row = f"memory after {load.output:,} output tokens"
    if packs_outputs:
        memory_row = f"most memory over {load.output:,} output tokens"
        end_row = f"most blocks over {load.output:,} output tokens"
    table.add_row(
        "tokens kept per layer",
        f"{load.prompt:,}",
        *(f"{round(each.kept_tokens):,}" for each in on),
        f"{forecast.kept_tokens / load.prompt:.1%}",
    )
    requests = [forecast.off, *(each.on for each in on)]
    for name, blocks in (
        (prefill_row, [request.prefill for request in requests]),
        ("blocks while decoding", [request.decoding for request in requests]),
        (end_row, [request.end for request in requests]),
        ("mean blocks over the output", [round(request.mean) for request in requests]),
    ):
        table.add_row(name, *(f"{count:,}" for count in blocks), _ratio(blocks[0], blocks[-1]))
    table.add_row(memory_row, *(size_text(request.end * block) for request in requests), "")
    pools = [forecast.pool_off, *(each.pool_on for each in on)]
    known_pools = [pool for pool in pools if pool is not None]
    if len(known_pools) == len(pools):
        table.add_section()
        _add_pools(table, known_pools, " (estimated)" if estimated else "")
    console.print(table)
    if forecast.lookahead:
        console.print(_lookahead_note(forecast), highlight=False)
    for line in (*_notes(forecast, stages), recommended_note()):
        console.print(line, highlight=False)


def recommended_note() -> str:
    """Return a note about the recommended budgets and the memory measured with them."""
    budgets = ", ".join(
        f"{name} {budget:g} ({RECOMMENDED_MEMORY[name]:.0%})"
        for name, budget in RECOMMENDED_BUDGETS.items()
    )
    return (
        f"Recommended budgets of {RECOMMENDED} with --kv-packed-dtype k4v3, and the share of 16-bit"
        f" memory that measured prompts took: {budgets}. vLLM's --kv-cache-dtype fp8 alone"
        " takes half of the memory and keeps all tokens. Compare both on your prompts with"
        " kvcompress compare."
    )


def _layers(forecast: Forecast, stages: int) -> str:
    if stages > 1:
        return f"all layers of one of the {stages} pipeline stages"
    group = forecast.group
    if forecast.with_states:
        return f"{group} layers; states have separate blocks"
    return "all layers" if group is None else f"{group} layers; windows have separate blocks"


def _add_pools(table: Table, pools: list[Concurrency], mark: str) -> None:
    """Add rows with how many requests fit: first without compression, then with it."""
    table.add_row(f"KV pool{mark}", *(size_text(pool.pool_bytes) for pool in pools), "")
    for name, counts in (
        ("blocks in the pool", [pool.blocks for pool in pools]),
        ("requests at once, all decoding", [pool.decoding for pool in pools]),
        ("requests at once, one in its prefill", [pool.beside_prefill for pool in pools]),
    ):
        factor = "" if name.startswith("blocks") else _ratio(counts[-1], counts[0])
        table.add_row(name, *(f"{count:,}" for count in counts), factor)


def _notes(forecast: Forecast, stages: int) -> list[str]:
    notes = []
    if forecast.left_whole is not None:
        notes.append(f"This prompt is not compressed: {forecast.left_whole}.")
    if forecast.in_pieces is not None:
        notes.append(_pieces_note(forecast, forecast.in_pieces))
    notes.append(
        f"A block holds {forecast.block_size} tokens of {_layers(forecast, stages)}:"
        f" {size_text(forecast.block_bytes)} per GPU."
        " Requests that share a prefix hold fewer blocks."
    )
    if forecast.page_tokens > forecast.block_size:
        notes.append(_packed_note(forecast))
    notes.append(
        f"Compression needs up to {size_text(forecast.extra_bytes)} per GPU besides the pool,"
        f" including {size_text(forecast.table_bytes)} of page tables. A lower --max-num-seqs makes"
        " the tables smaller."
    )
    if forecast.pays_from is not None:
        notes.append(
            "Compression frees whole blocks only. At this budget, every prompt of at least"
            f" {forecast.pays_from:,} tokens frees a block."
        )
    elif forecast.with_states:
        notes.append(
            "Compression frees whole blocks only. At this budget, no prompt length guarantees that"
            " a block is freed."
        )
    if forecast.worst is not None:
        notes.append(_worst_case_note(forecast, forecast.worst))
    if forecast.pool_on is None:
        notes.append(
            "To see how many requests fit, pass --kv-memory GIB (vLLM logs it as available KV cache"
            " memory), or --gpu-memory GIB for an estimate."
        )
    elif forecast.pool_on.decoding == forecast.pool_on.most:
        notes.append(f"More requests would fit, but --max-num-seqs is {forecast.pool_on.most:,}.")
    return notes


def _lookahead_note(forecast: Forecast) -> str:
    on, output = forecast.on, forecast.load.output
    return (
        f"During the look-ahead, the first {forecast.lookahead:,} of {output:,} output tokens, a"
        f" request holds {on.looking:,} blocks instead of {on.decoding:,}."
        " --kv-lookahead-on-pressure controls early compression when the pool is short."
    )


def _packed_note(forecast: Forecast) -> str:
    """Return a note about the tokens of a packed page, which budgets are rounded up to."""
    line = (
        f"In {forecast.packed_dtype}, a block holds {forecast.page_tokens:,} kept tokens of each"
        " layer. Budgets are rounded up to whole blocks"
    )
    if forecast.left_whole is not None:
        return f"{line}."
    kept, budget = forecast.kept_tokens, forecast.budget_tokens
    line += f": this prompt keeps {kept:,.0f} tokens per layer at a budget of {budget:,}."
    if kept >= _WASTEFUL * budget:
        line += " A smaller --block-size rounds up less."
    return line


def _pieces_note(forecast: Forecast, pieces: InPieces) -> str:
    if pieces.held_tokens is None:
        return "This prompt is compressed in pieces during prefill, and no token is dropped."
    line = (
        "This prompt is compressed in pieces during prefill. A layer holds"
        f" {pieces.held_tokens:,.0f} tokens between pieces and keeps {forecast.kept_tokens:,.0f}"
        " after prefill."
    )
    if pieces.held_tokens >= 2 * forecast.kept_tokens:
        return line
    line += " Tokens dropped between pieces cannot be recovered."
    if pieces.roomy is None:
        return f"{line} A smaller --kv-piece holds more tokens between pieces."
    return f"{line} --kv-max-whole {pieces.roomy} would hold twice the budget between pieces."


def _worst_case_note(forecast: Forecast, worst: WorstCase) -> str:
    blocks = worst.blocks
    line = (
        f"The largest request that clients may choose ({worst.asks}) holds {blocks.end:,} blocks,"
        f" {size_text(blocks.end * forecast.block_bytes)}"
    )
    if worst.pool is None:
        return f"{line}."
    return f"{line}. If all requests choose it, {worst.pool.decoding:,} fit while decoding."


def default_line(device: str, gpu_gib: float | None, defaults: Defaults) -> str:
    """Return a note about the default of --max-num-seqs."""
    if device == "cpu":
        return f"--max-num-seqs defaults to {defaults.max_num_seqs}, as in vLLM's server on a CPU."
    gpu = f"with {gpu_gib:g} GiB" if gpu_gib is not None else f"with {LARGE_GPU_GIB} GiB or more"
    return (
        f"--max-num-seqs defaults to {defaults.max_num_seqs}, as in vLLM on GPUs {gpu}. On an A100,"
        f" a GB10, or a GPU with less than {LARGE_GPU_GIB} GiB, vLLM uses 256."
    )


def estimate_line(memory: Estimate) -> str:
    """Return a note about how the pool size was estimated."""
    return (
        f"The pool size is an estimate: {memory.utilization:g} of {size_text(memory.gpu_bytes)},"
        f" minus {size_text(memory.weights_bytes)} of weights (from {memory.weights_source}) and"
        f" about {size_text(memory.working_bytes)} for activations and the CUDA runtime. vLLM"
        " measures it at startup: pass the value that it logs as --kv-memory."
    )


def _ratio(larger: int, smaller: int) -> str:
    return f"{larger / smaller:.1f}x" if smaller and larger != smaller else ""


def size_text(num_bytes: float) -> str:
    """Return a number of bytes with a binary unit."""
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} {unit}" if unit == "bytes" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.2f} GiB"
