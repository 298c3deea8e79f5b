"""The demo's report."""

import re
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_kvcompress.demo.ask import Run
from vllm_kvcompress.demo.questions import Question
from vllm_kvcompress.serving.process import Compressed

BAR = 26
"""Characters of the longest bar."""


def show(
    off: Run,
    on: Run,
    *,
    question: Question,
    method: str,
    budget: str,
    console: Console | None = None,
) -> int:
    """Print both runs side by side; the exit status is 0 if compression did what it promises.

    That is: the prompt was compressed, its blocks came back, and the tokens that come from the full
    cache are vLLM's own: the first one, and those of a look-ahead.

    Args:
        off: the run of vLLM alone.
        on: the run with compression.
        question: what the prompt ends in; whether the answers are right is said and does not
            change the status.
    """
    console = console or Console(width=100, highlight=False)
    result = on.compressed
    if result is None:
        console.print(
            f"The prompt of {on.prompt_tokens} tokens was not compressed: the server's log has no"
            " kv-compress line. Was it shorter than --kv-min-prompt?"
        )
        return 1
    console.rule(f"[bold]vllm serve MODEL --kv-compress {method} --kv-budget {budget}[/]")
    console.print(
        f"\n{on.prompt_tokens:,} tokens: Python's language reference with notes in it, such as\n"
        f"[bold]{escape(question.note)}[/] At the end the question:\n"
        f"[bold]{escape(question.asked)}[/]\n"
    )
    console.print(_side_by_side(off, on, result, f"{method}, budget {budget}"))
    console.print(f"\n{_verdict(off.answer, on.answer, question)}")
    same = _starts_alike(off, on, result, console)
    counted = min(off.blocks, on.blocks) > 0
    freed = off.blocks - on.blocks if counted else 0
    if not counted:
        console.print(
            "The blocks were not counted: an answer had ended when vLLM's gauge was read. Run it"
            " again while this machine does less."
        )
    elif freed <= 0:
        console.print("vLLM's usage gauge did not fall: the freed blocks did not come back.")
    else:
        console.print(f"[bold]{freed:.0f} of {off.blocks:.0f} blocks[/] went back to vLLM's pool.")
    if result.lookahead:
        console.print(
            f"They went back after {result.lookahead} tokens of the answer, which judged what to"
            " keep."
        )
    console.print(f"\nTokens kept of {result.prompt_tokens:,} in each layer:\n")
    console.print(_layers(result))
    requests = "one request" if on.requests == 1 else f"medians of {on.requests} requests"
    console.print(
        f"\n[dim]Times: this machine's, {requests} to each server, in turns, each prompt computed"
        " in full; per token of the second half of the answers.[/]"
    )
    return 0 if same and freed > 0 else 1


def show_request(off: Run, on: Run, *, request: str, console: Console) -> int:
    """Print both answers to an ordinary request, and how far they agree.

    Args:
        off: the run of vLLM alone.
        on: the run with compression.
        request: what the prompt ends in.

    Returns:
        0 if the prompt was compressed and the tokens from the full cache are vLLM's own.
    """
    result = on.compressed
    console.print(f"\nAn ordinary request, after {on.prompt_tokens:,} tokens of the same text:")
    console.print(f"[bold]{escape(request)}[/]\n")
    if result is None:
        console.print("This prompt was not compressed: the server's log has no kv-compress line.")
        return 1
    table = Table("vLLM alone", "compressed", header_style="bold", box=box.HORIZONTALS)
    table.add_row(escape(off.answer), escape(on.answer))
    console.print(table)
    alike = _alike(off.token_ids, on.token_ids)
    if off.token_ids == on.token_ids:
        console.print(f"\n[bold green]The same answer[/], all {alike} tokens.")
    else:
        console.print(
            f"\nThe answers are the same for [bold]{alike} of {len(off.token_ids)} tokens[/], and"
            " go on in other words."
        )
    return 0 if _starts_alike(off, on, result, console) else 1


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _starts_alike(off: Run, on: Run, result: Compressed, console: Console) -> bool:
    """Whether both begin with the full cache's tokens; says so where they do not."""
    full = 1 + result.lookahead
    if off.first_token_id == on.first_token_id and off.token_ids[:full] == on.token_ids[:full]:
        return True
    which = "The first token differs, and it comes"
    if result.lookahead:
        which = f"The first {full} tokens differ, and they come"
    console.print(f"{which} from the full cache: report this.")
    return False


def _side_by_side(off: Run, on: Run, result: Compressed, title: str) -> Table:
    same = off.first_token_id == on.first_token_id
    first = escape(f"{on.first_token!r}, ") + ("the same" if same else "[bold red]another[/]")
    table = Table("", "vLLM alone", title, header_style="bold", box=box.HORIZONTALS)
    table.add_row("answer", escape(off.answer), escape(on.answer), end_section=True)
    table.add_row("first token", escape(repr(off.first_token)), first)
    table.add_row("KV blocks while decoding", f"{off.blocks:.0f}", f"[green]{on.blocks:.0f}[/]")
    table.add_row(
        "tokens kept per layer", f"{off.prompt_tokens:,}", f"{result.kept_tokens:,.0f} on average"
    )
    table.add_row("time to first token", f"{off.first_token_s:.2f} s", f"{on.first_token_s:.2f} s")
    table.add_row(
        "time per token after it", f"{off.token_s * 1000:.0f} ms", f"{on.token_s * 1000:.0f} ms"
    )
    return table


def _verdict(off: str, on: str, question: Question) -> str:
    """Whether compression changed the answer, and whether it is still right."""
    fact = f"[bold]{escape(question.fact)}[/]"
    if not question.answered_by(on):
        full = "has it" if question.answered_by(off) else "does not have it either"
        return (
            f"[bold red]The compressed answer is wrong:[/] it must say {fact}."
            f" The full cache's answer {full}."
        )
    if off == on:
        return f"[bold green]The same answer[/], word for word, and right: {fact}."
    full = "both are right" if question.answered_by(off) else "only the compressed one is right"
    return f"[bold yellow]Other words[/], and {full}: {fact}."


def _layers(result: Compressed) -> Table:
    """A bar for each layer, in two columns that are read downwards."""
    counts = result.layer_tokens
    rows = (len(counts) + 1) // 2
    table = Table.grid(padding=(0, 1))
    for _ in range(2):
        table.add_column(justify="right", width=4)
        table.add_column(justify="right", width=6)
        table.add_column(width=BAR + 6)
    for row in range(rows):
        cells = []
        for layer in range(row, len(counts), rows):
            bar = "█" * round(BAR * counts[layer] / max(counts))
            cells += [str(layer), f"{counts[layer]:,}", f"[cyan]{bar}[/]"]
        table.add_row(*cells)
    return table


def save_picture(console: Console, path: Path, title: str) -> None:
    """Write what a recording console has shown as an SVG that loads nothing from elsewhere."""
    svg = re.sub(r"@font-face\s*{[^}]*}", "", console.export_svg(title=title))
    # Some viewers drop spaces unless they are told not to.
    svg = svg.replace("<svg ", '<svg xml:space="preserve" ', 1)
    path.write_text(re.sub(r"<!--.*?-->", "", svg))
