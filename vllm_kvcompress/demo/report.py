"""Print the demo's report."""

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
"""Length of the longest bar in characters."""


def show(
    off: Run,
    on: Run,
    *,
    question: Question,
    method: str,
    budget: str,
    packed_dtype: str,
    console: Console | None = None,
) -> int:
    """Print both servers' replies to the question side by side.

    Args:
        off: the run of vLLM alone.
        on: the run with compression.
        question: the question at the end of the prompt.

    Returns:
        The exit status. It is 0 if the prompt was compressed, vLLM got blocks back, and both runs
        have the same output tokens up to the compression. The report says whether the answers are
        right, but a wrong answer does not change the status.
    """
    console = console or Console(width=100, highlight=False)
    result = on.compressed
    if result is None:
        console.print(
            f"The prompt of {on.prompt_tokens} tokens was not compressed: the server's log has no"
            " kv-compress line for it. Is the prompt shorter than --kv-min-prompt?"
        )
        return 1
    flags = f"--kv-compress {method} --kv-budget {budget} --kv-packed-dtype {packed_dtype}"
    console.rule(f"[bold]vllm serve MODEL {flags}[/]")
    console.print(
        f"\nThe prompt has {on.prompt_tokens:,} tokens: Python's language reference with notes in"
        f" it, such as\n[bold]{escape(question.note)}[/] It ends with a question:\n"
        f"[bold]{escape(question.asked)}[/]\n"
    )
    console.print(_side_by_side(off, on, result, f"{method}, budget {budget}, {packed_dtype}"))
    console.print(f"\n{_verdict(off.answer, on.answer, question)}")
    same = _starts_alike(off, on, result, console)
    counted = min(off.blocks, on.blocks) > 0
    freed = off.blocks - on.blocks if counted else 0
    if not counted:
        console.print(
            "The KV blocks were not counted: a request had ended before the demo read vLLM's gauge."
            " Run the demo again when the machine is less busy."
        )
    elif freed <= 0:
        console.print("vLLM got no KV blocks back: its usage gauge shows no fewer blocks in use.")
    else:
        console.print(
            f"vLLM got [bold]{freed:.0f} of {off.blocks:.0f} KV blocks[/] back for other requests."
        )
    if result.lookahead:
        console.print(
            f"Compression waits for the first {result.lookahead} output tokens; their attention"
            f" decides which tokens it keeps. {_shared_tokens(off, on, result)}"
        )
    console.print(f"\nTokens kept in each layer, out of the prompt's {result.prompt_tokens:,}:\n")
    console.print(_layers(result))
    requests = "one request" if on.requests == 1 else f"medians of {on.requests} requests"
    console.print(
        f"\n[dim]Times on this machine: {requests} per server, one at a time, without prefix"
        " caching. The time per output token is that of the second half of the output.[/]"
    )
    return 0 if same and freed > 0 else 1


def show_request(off: Run, on: Run, *, request: str, console: Console) -> int:
    """Print both outputs of an ordinary request, and how many tokens agree.

    Args:
        off: the run of vLLM alone.
        on: the run with compression.
        request: the instruction at the end of the prompt.

    Returns:
        The exit status: 0 if the prompt was compressed and both runs have the same output tokens
        up to the compression.
    """
    result = on.compressed
    console.print(
        f"\nAn ordinary request, with a prompt of {on.prompt_tokens:,} tokens of the same manual:"
    )
    console.print(f"[bold]{escape(request)}[/]\n")
    if result is None:
        console.print(
            "This prompt was not compressed: the server's log has no kv-compress line for it."
        )
        return 1
    table = Table("vLLM alone", "compressed", header_style="bold", box=box.HORIZONTALS)
    table.add_row(escape(off.answer), escape(on.answer))
    console.print(table)
    alike = _alike(off.token_ids, on.token_ids)
    if off.token_ids == on.token_ids:
        console.print(f"\n[bold green]The same output[/], all {alike} tokens.")
    else:
        console.print(f"\n{_shared_tokens(off, on, result)} Then the wording differs.")
    return 0 if _starts_alike(off, on, result, console) else 1


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens in the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _shared_tokens(off: Run, on: Run, result: Compressed) -> str:
    """Return a sentence on how many output tokens agree, and how many precede the compression."""
    alike = _alike(off.token_ids, on.token_ids)
    before = min(1 + result.lookahead, alike)
    return (
        f"The first [bold]{alike} of {len(off.token_ids)} output tokens[/] are the same;"
        f" {before} of them were written before the compression."
    )


def _starts_alike(off: Run, on: Run, result: Compressed, console: Console) -> bool:
    """Return whether the output tokens up to the compression are equal; print a message if not."""
    full = 1 + result.lookahead
    if off.first_token_id == on.first_token_id and off.token_ids[:full] == on.token_ids[:full]:
        return True
    which = f"first {full} output tokens differ" if result.lookahead else "first token differs"
    console.print(f"The {which}, although the prompt was not compressed yet: please report this.")
    return False


def _side_by_side(off: Run, on: Run, result: Compressed, title: str) -> Table:
    same = off.first_token_id == on.first_token_id
    verdict = "the same" if same else "[bold red]a different one[/]"
    first = escape(f"{on.first_token!r}, ") + verdict
    table = Table("", "vLLM alone", title, header_style="bold", box=box.HORIZONTALS)
    table.add_row("output", escape(off.answer), escape(on.answer), end_section=True)
    table.add_row("first token", escape(repr(off.first_token)), first)
    table.add_row("KV blocks while decoding", f"{off.blocks:.0f}", f"[green]{on.blocks:.0f}[/]")
    table.add_row(
        "kept tokens per layer", f"{off.prompt_tokens:,}", f"{result.kept_tokens:,.0f} on average"
    )
    table.add_row("time to first token", f"{off.first_token_s:.2f} s", f"{on.first_token_s:.2f} s")
    table.add_row(
        "time per output token", f"{off.token_s * 1000:.0f} ms", f"{on.token_s * 1000:.0f} ms"
    )
    return table


def _verdict(off: str, on: str, question: Question) -> str:
    """Return a sentence on whether compression changed the answer and whether it is right."""
    fact = f"[bold]{escape(question.fact)}[/]"
    if not question.answered_by(on):
        alone = "has it" if question.answered_by(off) else "does not have it either"
        return (
            f"[bold red]The compressed server's answer is wrong:[/] it lacks {fact}."
            f" The answer of vLLM alone {alone}."
        )
    if off == on:
        return f"[bold green]The same answer[/], word for word, and right: {fact}."
    right = "both are right" if question.answered_by(off) else "only the compressed one is right"
    return f"[bold yellow]The answers differ[/] in wording, and {right}: {fact}."


def _layers(result: Compressed) -> Table:
    """Return one bar per layer, in two columns."""
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
    """Save a recording console's output as an SVG file without links to other files."""
    svg = re.sub(r"@font-face\s*{[^}]*}", "", console.export_svg(title=title))
    # Without this attribute, some viewers drop spaces.
    svg = svg.replace("<svg ", '<svg xml:space="preserve" ', 1)
    path.write_text(re.sub(r"<!--.*?-->", "", svg))
