"""Print the demo's report."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_kvcompress.demo.ask import Measured
from vllm_kvcompress.demo.figures import Comparison
from vllm_kvcompress.demo.questions import Question

SHOWN = 2
"""Requests whose outputs are shown."""
SHOWN_TOKENS = 60
"""Tokens shown of each of these outputs, from the compression on."""
Decode = Callable[[Sequence[int]], str]


def show_load(load: Comparison, *, pool: int, fit: int, instruction: str, console: Console) -> None:
    """Print what both servers did with the requests that were sent at once.

    Args:
        pool: KV blocks of each server.
        fit: uncompressed requests that fit into the pool.
        instruction: the end of each prompt.
    """
    replies = load.off.replies
    prompt_tokens = sum(reply.prompt_tokens for reply in replies) // len(replies)
    console.print(
        f"\n[bold]{len(replies)} prompts at once[/] of {prompt_tokens:,} tokens on average, each a"
        f" part of Python's language reference and\n[bold]{escape(instruction)}[/]\nBoth servers"
        f" have {pool} KV blocks of 128 tokens, enough for {fit} uncompressed requests, and write"
        f" {len(replies[0].token_ids)} tokens per request.\n"
    )
    table = Table("", "vLLM alone", "compressed", box=box.HORIZONTALS)
    for row, cell in (
        ("requests that ran at once, mean", lambda m: f"{m.mean_running:.1f}"),
        ("requests that ran at once, maximum", lambda m: f"{m.max_running:.0f}"),
        ("time until all were done", lambda m: f"{m.wall_s:.1f} s"),
        ("time until a request was done, mean", lambda m: f"{m.request_s:.1f} s"),
        ("output tokens per second", lambda m: f"{m.tokens_per_s:.1f}"),
        ("time to first token, median", lambda m: f"{m.first_token_s:.1f} s"),
        ("KV blocks held by a running request, mean", lambda m: f"{m.blocks_per_request:.1f}"),
        ("KV blocks in use, maximum", lambda m: f"{m.max_blocks:.0f}"),
        ("preemptions", lambda m: f"{m.preemptions}"),
    ):
        table.add_row(row, *_pair(load, cell))
    console.print(table)
    console.print("[dim]A request counts as running from the start of its prefill.[/]")


def _pair(both: Comparison, cell: Callable[[Measured], str]) -> tuple[str, str]:
    return cell(both.off), cell(both.on)


def show_outputs(load: Comparison, decode: Decode, console: Console) -> None:
    """Print how many output tokens are equal, and the start of some outputs."""
    agreements = load.agreements
    counts = ", ".join(f"{each.equal} of {each.tokens}" for each in agreements)
    console.print(
        f"\n[bold]{load.equal} of {load.tokens} output tokens after the compression are equal,[/]"
        f" by request: {counts}. A request's tokens count until its first different token, since"
        " both outputs then continue different texts.\n"
    )
    table = Table("vLLM alone", "compressed", box=box.HORIZONTALS, show_lines=True)
    for off, on, each in list(zip(load.off.replies, load.on.replies, agreements, strict=True))[
        :SHOWN
    ]:
        first = 1 + on.compressed.lookahead if on.compressed else 0
        shown = min(each.tokens, SHOWN_TOKENS)
        table.add_row(
            *(
                "… " + _colored(reply.token_ids[first : first + shown], each.equal, decode) + " …"
                for reply in (off, on)
            )
        )
    console.print(table)
    console.print(
        "[dim]From the compression on, which follows the look-ahead; equal tokens in green.[/]"
    )


def _colored(ids: Sequence[int], equal: int, decode: Decode) -> str:
    return f"[green]{escape(decode(ids[:equal]))}[/]{escape(decode(ids[equal:]))}"


def show_question(
    one: Comparison,
    question: Question,
    answers: Sequence[Sequence[int]],
    named: Sequence[Sequence[str]],
    decode: Decode,
    console: Console,
) -> None:
    """Print the question, both answers, and the figures of a single request.

    Args:
        answers: tokens of the answer of vLLM alone, and of the compressed server's.
        named: the facts that each answer names after the compression.
    """
    (off,), (on,) = one.off.replies, one.on.replies
    console.print(
        f"\n[bold]One request alone:[/] {off.prompt_tokens:,} tokens of the manual with notes, such"
        f" as\n[bold]{escape(question.notes[-1].text)}[/] It ends with\n"
        f"[bold]{escape(question.asked)}[/]\n"
    )
    table = Table("", "vLLM alone", "compressed", box=box.HORIZONTALS)
    table.add_row("answer", *(escape(decode(ids).strip()) for ids in answers), end_section=True)
    facts = (escape(", ".join(each)) or "[bold red]none[/]" for each in named)
    table.add_row("facts named after the compression", *facts)
    table.add_row("equal tokens after the compression", "", f"{one.equal} of {one.tokens}")
    table.add_row("time to first token", *_pair(one, lambda m: f"{m.first_token_s:.2f} s"))
    token_ms = _pair(one, lambda m: f"{m.replies[0].token_s * 1000:.0f} ms")
    table.add_row("time per output token", *token_ms)
    table.add_row("KV blocks held at the end", *_pair(one, lambda m: f"{m.last_blocks:.0f}"))
    if on.compressed:
        kept = f"{on.compressed.kept_tokens:,.0f}"
        table.add_row("prompt tokens kept, mean over layers", f"{off.prompt_tokens:,}", kept)
    console.print(table)


def show_losses(losses: Sequence[str], failures: Sequence[str], console: Console) -> None:
    """Print one line for each loss that was seen, and for each reason to fail."""
    if losses:
        console.print("\n[bold]What compression lost here:[/]")
    for loss in losses:
        console.print(f"* {escape(loss)}")
    for failure in failures:
        console.print(f"\n[bold red]Failed:[/] {escape(failure)}")


def save_picture(console: Console, path: Path, title: str) -> None:
    """Save a recording console's output as an SVG file without links to other files."""
    svg = re.sub(r"@font-face\s*{[^}]*}", "", console.export_svg(title=title))
    # Without this attribute, some viewers drop spaces.
    svg = svg.replace("<svg ", '<svg xml:space="preserve" ', 1)
    path.write_text(re.sub(r"<!--.*?-->", "", svg))
