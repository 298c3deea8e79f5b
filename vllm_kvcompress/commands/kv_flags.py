"""Flags of ``vllm serve`` that the ``kvcompress`` commands also take."""

from typing import Annotated, Any

import typer

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.text import parse_json

Compress = Annotated[
    str | None,
    typer.Option("--kv-compress", metavar="METHOD", help="Compression method."),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--kv-budget",
        metavar="BUDGET",
        help="How much to keep: a ratio of the prompt in (0, 1], or a whole number of tokens per"
        " layer.",
    ),
]
PackedDtype = Annotated[
    str | None,
    typer.Option(
        "--kv-packed-dtype",
        metavar="FORMAT",
        help="Format of kept tokens: auto, or k4v3 for 4 times as many tokens in the same memory.",
    ),
]
Window = Annotated[
    int | None,
    typer.Option(
        "--kv-window",
        metavar="TOKENS",
        help="Observation window: the last tokens of a prompt, which are always kept and whose"
        " queries score the other tokens.",
    ),
]
Lookahead = Annotated[
    int | None,
    typer.Option(
        "--kv-lookahead",
        metavar="TOKENS",
        help="Output tokens to wait for before compressing. Their attention scores the prompt.",
    ),
]
MinPrompt = Annotated[
    int | None,
    typer.Option(
        "--kv-min-prompt", metavar="TOKENS", help="Do not compress prompts shorter than this."
    ),
]
MaxWhole = Annotated[
    int | None,
    typer.Option(
        "--kv-max-whole",
        metavar="TOKENS",
        help="Compress prompts longer than this in pieces during prefill.",
    ),
]
Piece = Annotated[
    int | None,
    typer.Option(
        "--kv-piece", metavar="TOKENS", help="Piece length of prompts above --kv-max-whole."
    ),
]
Probe = Annotated[
    int | None,
    typer.Option(
        "--kv-probe",
        metavar="TOKENS",
        help="Last tokens of a prompt above --kv-max-whole, whose queries score each piece.",
    ),
]
ProbeFirst = Annotated[
    int | None,
    typer.Option(
        "--kv-probe-first",
        metavar="TOKENS",
        help="First tokens of a prompt above --kv-max-whole, whose queries also score each piece.",
    ),
]
DecodeBudget = Annotated[
    int | None,
    typer.Option(
        "--kv-decode-budget",
        metavar="TOKENS",
        help="Maximum tokens per layer that a request may hold while it decodes.",
    ),
]
DecodeInterval = Annotated[
    int | None,
    typer.Option(
        "--kv-decode-interval",
        metavar="TOKENS",
        help="Output tokens between two compressions to --kv-decode-budget. Without it, in k4v3:"
        " output tokens between two packings, which drop none.",
    ),
]
AllowOverride = Annotated[
    str | None,
    typer.Option(
        "--kv-allow-override",
        metavar="METHODS",
        help="Methods that requests may choose: all, or names separated by commas.",
    ),
]
BudgetBounds = Annotated[
    str | None,
    typer.Option(
        "--kv-budget-bounds",
        metavar="MIN:MAX",
        help="Budgets that requests may choose: 0.05:0.5, 256:4096, or both separated by a comma.",
    ),
]
Aliases = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-alias",
        metavar="NAME=METHOD:BUDGET",
        help="Additional model name whose requests use this method and budget, and with"
        " NAME=METHOD:BUDGET:k4v3 also this format. May be repeated.",
    ),
]
Everything = Annotated[
    str | None,
    typer.Option(
        "--kv-compress-config",
        metavar="JSON",
        help="All settings as a JSON object. The flags override it.",
    ),
]


def settings_from(everything: str | None, **flags: Any) -> dict[str, Any]:
    """Return the settings given on the command line, by their keys in `CompressionConfig`.

    Args:
        everything: the JSON of ``--kv-compress-config``, None if not given.
        flags: the other flags by setting key, None or empty if not given. They override
            `everything`.

    Raises:
        ConfigError: `everything` is not a JSON object.
    """
    settings: dict[str, Any] = {}
    if everything is not None:
        try:
            settings = parse_json(everything)
        except ValueError as e:
            raise ConfigError(
                f"--kv-compress-config must be a JSON object, got {everything!r} ({e})"
            ) from None
        if not isinstance(settings, dict):
            raise ConfigError(f"--kv-compress-config must be a JSON object, got {everything!r}")
    return settings | {key: value for key, value in flags.items() if value not in (None, [])}
