"""The demo's report."""

import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def show(off: Any, on: Any, *, method: str, budget: str, console: Console | None = None) -> int:
    """Print both runs side by side; the exit status is 0 if the prompt really was compressed.

    Args:
        off: the run without compression.
        on: the run with it.
    """
    console = console or Console(width=100)
    result = on.compressed
    if result is None:
        console.print(
            f"The prompt of {on.prompt_tokens} tokens was not compressed: the server's log has no"
            " kv-compress line. Was it shorter than --kv-min-prompt?"
        )
        return 1
    console.rule(f"--kv-compress {method} --kv-budget {budget}")
    console.print(f"[bold]Answer, compressed[/]: {on.answer.strip()}\n", markup=True)
    table = Table("", "off", method)
    table.add_row("prompt tokens", str(off.prompt_tokens), str(on.prompt_tokens))
    table.add_row("tokens kept per layer", str(off.prompt_tokens), f"{result.kept_tokens:.0f}")
    table.add_row("KV blocks of the prompt", str(result.blocks_before), str(result.blocks_after))
    table.add_row("KV blocks in use while decoding", f"{off.blocks:.0f}", f"{on.blocks:.0f}")
    table.add_row(
        "decode, tokens per second", f"{off.tokens_per_second:.1f}", f"{on.tokens_per_second:.1f}"
    )
    same = "yes" if off.first_token == on.first_token else "no"
    table.add_row("same first token", "", same)
    console.print(table)
    console.print("\nTokens kept in each layer:")
    most = max(result.layer_tokens)
    for layer, tokens in enumerate(result.layer_tokens):
        bar = "█" * round(60 * tokens / most)
        console.print(f"{layer:3d} {tokens:6d} {bar}", highlight=False)
    if on.blocks >= off.blocks:
        console.print("vLLM's usage gauge did not fall: the freed blocks did not come back.")
        return 1
    freed = off.blocks - on.blocks
    console.print(f"\n{freed:.0f} of {off.blocks:.0f} blocks went back to vLLM's pool.")
    return 0


def save_picture(console: Console, path: Path, title: str) -> None:
    """Write what a recording console has shown as an SVG that loads nothing from elsewhere."""
    svg = re.sub(r"@font-face\s*{[^}]*}", "", console.export_svg(title=title))
    path.write_text(re.sub(r"<!--.*?-->", "", svg))
