"""Text output of ``kvcompress plan``: a table and notes."""

from typing import Any

from rich.console import Console
from rich.table import Table

from kvcompress_kernels import k4v3
from vllm_kvcompress.commands.plan.forecast import (
    DEVICES_WITH_K4V3,
    Concurrency,
    Forecast,
    InPieces,
    NextHits,
    PlanResult,
    RequestBlocks,
    WarmConversations,
    Workload,
    WorstCase,
)
from vllm_kvcompress.commands.plan.gpu_memory import LARGE_GPU_GIB, Defaults, Estimate
from vllm_kvcompress.commands.plan.model_shape import ModelShape
from vllm_kvcompress.methods.registry import RECOMMENDED, RECOMMENDED_BUDGETS, RECOMMENDED_MEMORY
from vllm_kvcompress.settings.config import CompressionConfig

_ROUNDING = 0.05
"""Share by which kept tokens must differ from the budget to be mentioned."""
_SMALL_BLOCK = 32
"""Tokens of a block below which a smaller --block-size is not suggested."""


def show_plan(result: PlanResult) -> None:
    """Print the blocks and memory of a request, without and with compression, and how many fit."""
    console, options, shape = Console(), result.options, result.shape
    load, hits = result.forecast.load, result.next_hits
    console.print(_title(result), style="bold", highlight=False)
    console.print(_table(result))
    lines: list[str] = []
    if result.forecast.lookahead:
        lines.append(_lookahead_note(result.forecast))
    lines += _notes(result.forecast, options.stages, options.device)
    if result.drafts.layers:
        lines.append(_drafts_note(result.drafts.layers))
    if result.warm is not None:
        lines += _warm_notes(load, result.warm)
    if hits is not None and hits.on != hits.off:
        lines.append(_next_turn_note(load, hits))
    lines += _recommended_notes(options.device, shape)
    if options.requests is None:
        lines.append(_default_note(options.device, options.gpu_gib, result.defaults))
    if result.estimated is not None:
        lines.append(_estimate_note(result.estimated))
    if shape.longest is not None and load.cached > shape.longest:
        lines.append(f"This model supports {shape.longest:,} tokens; vLLM refuses longer requests.")
    for line in lines:
        console.print(line, highlight=False)


def _title(result: PlanResult) -> str:
    load, shape, settings = result.forecast.load, result.shape, result.settings
    num_gpus = result.options.ranks * result.options.stages
    gpus = f", {num_gpus} GPUs" if num_gpus > 1 else ""
    title = (
        f"{result.options.model.rstrip('/').rsplit('/', 1)[-1]} ({_model_layers(shape)},"
        f" {shape.kv_heads} KV heads of {shape.head_dim}, {shape.dtype}{gpus}):"
        f" {load.prompt:,} tokens, --kv-compress {settings.compress}"
        f" --kv-budget {settings.budget}"
    )
    if load.protected:
        title += f", {load.protected:,} protected tokens"
    given: dict[str, Any] = {
        "packed-dtype": settings.packed.dtype,
        "lookahead": settings.lookahead.tokens,
        "decode-budget": settings.decode.budget,
    }
    if settings.reuses_pages:
        given["reuse"] = settings.packed.reuse
    elif settings.packs_outputs:
        given["decode-interval"] = settings.decode.interval
    if settings.pieces.max_whole is not None:
        first, last = settings.scoring_query_counts
        given |= {"max-whole": settings.pieces.max_whole, "piece": settings.pieces.length}
        given |= {"probe": last, "probe-first": first or None}
    flags = (f" --kv-{name} {value}" for name, value in given.items() if value is not None)
    return title + "".join(flags)


def _model_layers(shape: ModelShape) -> str:
    groups = shape.groups
    if not groups.num_uncompressed:
        return f"{shape.layers} layers"
    if groups.stateful:
        return (
            f"{shape.layers} layers, {len(groups.full)} of them compressed and {groups.stateful}"
            " with a recurrent state"
        )
    return (
        f"{shape.layers} layers, {len(groups.full)} of them compressed and {groups.windowed} with a"
        f" sliding window of {groups.window:,} tokens"
    )


def _table(result: PlanResult) -> Table:
    """Return the table of blocks and memory, and of the requests that fit if the pool is known."""
    forecast, warm, settings = result.forecast, result.warm, result.settings
    # A request may hold the most blocks before its end if outputs are packed too.
    packs_outputs = settings.decode.budget is not None or settings.packs_outputs
    block, load = forecast.block_bytes, forecast.load
    auto = forecast.auto
    untested = "" if result.options.device in DEVICES_WITH_K4V3 else ", untested"
    compressed = ["compressed"] if auto is None else ["auto", forecast.packed_dtype + untested]
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
    if warm is not None:
        # Requests in the cache's dtype never read packed pages.
        blocks = [*[warm.blocks_off] * len(on), warm.blocks_on]
        ratio = _ratio(blocks[0], blocks[-1])
        table.add_row("blocks cached between turns", *(f"{n:,}" for n in blocks), ratio)
    table.add_row(memory_row, *(_size_text(request.end * block) for request in requests), "")
    pools = [forecast.pool_off, *(each.pool_on for each in on)]
    known_pools = [pool for pool in pools if pool is not None]
    if len(known_pools) == len(pools):
        table.add_section()
        _add_pools(
            table, known_pools, requests, " (estimated)" if result.estimated is not None else ""
        )
        if warm is not None and warm.off is not None and warm.on is not None:
            counts = [*[warm.off] * len(on), warm.on]
            ratio = _ratio(counts[-1], counts[0])
            table.add_row("idle conversations kept warm", *(f"{n:,}" for n in counts), ratio)
    return table


def _recommended_notes(device: str, shape: ModelShape) -> list[str]:
    """Return notes about the recommended settings for a device, and about fp8 with a model."""
    rows = k4v3.rows_per_group(shape.itemsize)
    packs = shape.cache is None and not k4v3.refusal(shape.head_dim, rows, shape.itemsize)
    shares = ", ".join(
        f"{RECOMMENDED_MEMORY[name]:.0%} at --kv-budget {budget:.1f}"
        for name, budget in RECOMMENDED_BUDGETS.items()
    )
    memory = (
        f"prompts took these shares of their 16-bit memory: {shares}. At 1,500 tokens, the last 32,"
        " which now stay in 16 bits, add 2 to 3 points."
    )
    in_16_bits = (
        f"Recommended: --kv-compress {RECOMMENDED} --kv-budget {CompressionConfig().budget}."
    )
    if not packs:
        advice = in_16_bits
    elif device in DEVICES_WITH_K4V3:
        advice = (
            f"Recommended: --kv-compress {RECOMMENDED} --kv-packed-dtype k4v3. Measured {memory}"
        )
        if shape.itemsize == 2:
            advice += (
                " With 8 prompts of 6,000 tokens at 0.4, decode steps took 0.83 times as long as in"
                " 16 bits on an EPYC, but 1.20 times on a Xeon with AMX."
            )
    else:
        advice = f"{in_16_bits} No GPU has run --kv-packed-dtype k4v3. On CPUs, measured {memory}"
    fp8 = (
        "vLLM's --kv-cache-dtype fp8 alone takes half of the memory and keeps all tokens. How much"
        " outputs change depends on the model. To measure it, pass the URL of such a server to"
        " kvcompress compare --against."
    )
    if shape.key_biases:
        fp8 += (
            " This model's keys have biases, as in Qwen2.5. Where these are large, fp8 without"
            " calibrated scales changes many output tokens."
        )
    return [advice, fp8]


def _layers(forecast: Forecast, stages: int) -> str:
    if stages > 1:
        return f"all layers of one of the {stages} pipeline stages"
    group = forecast.group
    if forecast.with_states:
        return f"{group} layers; states have separate blocks"
    return "all layers" if group is None else f"{group} layers; windows have separate blocks"


def _add_pools(
    table: Table, pools: list[Concurrency], requests: list[RequestBlocks], mark: str
) -> None:
    """Add rows with how many requests fit: first without compression, then with it."""
    mean = [
        min(int(pool.blocks / request.mean), pool.most) if pool.decoding else 0
        for pool, request in zip(pools, requests, strict=True)
    ]
    table.add_row(f"KV pool{mark}", *(_size_text(pool.pool_bytes) for pool in pools), "")
    for name, counts in (
        ("blocks in the pool", [pool.blocks for pool in pools]),
        ("requests at once, all decoding", [pool.decoding for pool in pools]),
        ("requests at once, one in its prefill", [pool.beside_prefill for pool in pools]),
        ("requests at once, of mean size", mean),
    ):
        factor = "" if name.startswith("blocks") else _ratio(counts[-1], counts[0])
        table.add_row(name, *(f"{count:,}" for count in counts), factor)


def _notes(forecast: Forecast, stages: int, device: str) -> list[str]:
    notes, place = [], " per GPU" if device == "cuda" else ""
    if forecast.left_whole is not None:
        notes.append(f"This prompt is not compressed: {forecast.left_whole}.")
    if forecast.in_pieces is not None:
        notes.append(_pieces_note(forecast, forecast.in_pieces))
    notes.append(
        f"A block holds {forecast.block_size} tokens of {_layers(forecast, stages)}:"
        f" {_size_text(forecast.block_bytes)}{place}."
        " Uncompressed requests that share a prefix hold fewer blocks."
    )
    if forecast.page_tokens > forecast.block_size:
        notes.append(
            f"In {forecast.packed_dtype}, a block holds {forecast.page_tokens:,} kept tokens of"
            " each layer."
        )
    if (rounding := _rounding_note(forecast)) is not None:
        notes.append(rounding)
    notes.append(
        f"Compression needs up to {_size_text(forecast.extra_bytes)}{place} besides the pool,"
        f" including {_size_text(forecast.table_bytes)} of page tables. A lower --max-num-seqs"
        " makes the tables smaller."
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
    if forecast.parked is not None:
        notes.append(
            f"Host memory holds the pages of {forecast.parked:,} preempted requests with all of"
            " their output."
        )
    if forecast.worst is not None:
        notes.append(_worst_case_note(forecast, forecast.worst))
    if forecast.pool_on is None:
        notes.append(
            "To see how many requests fit, pass --kv-memory GIB (vLLM logs it as available KV cache"
            " memory)" + (", or --gpu-memory GIB for an estimate." if device == "cuda" else ".")
        )
    elif forecast.pool_on.blocks // forecast.on.end > forecast.pool_on.most:
        notes.append(f"More requests would fit, but --max-num-seqs is {forecast.pool_on.most:,}.")
    return notes


def _lookahead_note(forecast: Forecast) -> str:
    on, output = forecast.on, forecast.load.output
    return (
        f"During the look-ahead, the first {forecast.lookahead:,} of {output:,} output tokens, a"
        f" request holds {on.looking:,} blocks instead of {on.decoding:,}."
        " If the pool is short, prompts are compressed before their look-ahead ends."
    )


def _drafts_note(layers: int) -> str:
    counted = "layer keeps" if layers == 1 else "layers keep"
    return (
        f"The draft model's {layers} {counted} all tokens in the same blocks, which the figures"
        " include."
    )


def _rounding_note(forecast: Forecast) -> str | None:
    """Return a note about kept tokens that differ from the budget, None if they hardly do."""
    kept, budget, tokens = forecast.kept_tokens, forecast.budget_tokens, forecast.load.prompt
    if forecast.left_whole is not None or abs(kept - budget) <= _ROUNDING * budget:
        return None
    reason = " and hold the protected tokens" if forecast.load.protected else ""
    line = (
        f"This prompt keeps {kept:,.0f} tokens per layer ({kept / tokens:.1%}) at a budget of"
        f" {budget:,}, because kept tokens fill whole blocks{reason}."
    )
    if forecast.block_size > _SMALL_BLOCK and not forecast.with_states:
        line += " A smaller --block-size comes closer."
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
        f" {_size_text(blocks.end * forecast.block_bytes)}"
    )
    if worst.pool is None:
        return f"{line}."
    return f"{line}. If all requests choose it, {worst.pool.decoding:,} fit while decoding."


def _next_turn_note(load: Workload, hits: NextHits) -> str:
    """Return a note about the tokens that the next turn of a chat need not compute."""
    return (
        f"Next turn of a chat: {hits.on:,} of this request's {load.prompt + load.output:,} tokens"
        f" are in the prefix cache, instead of {hits.off:,} without compression."
    )


def _warm_notes(load: Workload, warm: WarmConversations) -> list[str]:
    """Return notes about conversations in the prefix cache, and the memory that reuse reserves."""
    fp8 = ""
    if warm.fp8 is not None:
        fp8 = f" With vLLM's --kv-cache-dtype fp8 alone, {warm.fp8:,} stay warm."
    return [
        f"A conversation is a prompt and its output, {load.prompt + load.output:,} tokens. Between"
        f" turns it stays warm until running requests take its blocks.{fp8}",
        f"Reuse reserves {_size_text(warm.scratch_bytes)} of scratch memory at startup: one layer's"
        " keys and values for --max-model-len tokens.",
    ]


def _default_note(device: str, gpu_gib: float | None, defaults: Defaults) -> str:
    """Return a note about the default of --max-num-seqs."""
    if device == "cpu":
        return f"--max-num-seqs defaults to {defaults.max_num_seqs}, as in vLLM's server on a CPU."
    gpu = f"with {gpu_gib:g} GiB" if gpu_gib is not None else f"with {LARGE_GPU_GIB} GiB or more"
    return (
        f"--max-num-seqs defaults to {defaults.max_num_seqs}, as in vLLM on GPUs {gpu}. On an A100,"
        f" a GB10, or a GPU with less than {LARGE_GPU_GIB} GiB, vLLM uses 256."
    )


def _estimate_note(memory: Estimate) -> str:
    """Return a note about how the pool size was estimated."""
    return (
        f"The pool size is an estimate: {memory.utilization:g} of {_size_text(memory.gpu_bytes)},"
        f" minus {_size_text(memory.weights_bytes)} of weights (from {memory.weights_source}) and"
        f" about {_size_text(memory.working_bytes)} for activations and the CUDA runtime. vLLM"
        " measures it at startup: pass the value that it logs as --kv-memory."
    )


def _ratio(larger: int, smaller: int) -> str:
    return f"{larger / smaller:.1f}x" if smaller and larger != smaller else ""


def _size_text(num_bytes: float) -> str:
    """Return a number of bytes with a binary unit."""
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} {unit}" if unit == "bytes" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.2f} GiB"
