"""The flags of ``vllm serve --kv-...`` that our commands take as well, and what they set."""

from typing import Annotated, Any

import typer

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.text import parse_json

Compress = Annotated[
    str | None,
    typer.Option("--kv-compress", metavar="METHOD", help="The method that compresses prompts."),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--kv-budget",
        metavar="BUDGET",
        help="What is kept: a ratio of the prompt in (0, 1], or a whole number of tokens per"
        " layer.",
    ),
]
Window = Annotated[
    int | None,
    typer.Option(
        "--kv-window",
        metavar="TOKENS",
        help="Last tokens of the prompt, which score the others and are always kept.",
    ),
]
Lookahead = Annotated[
    int | None,
    typer.Option(
        "--kv-lookahead",
        metavar="TOKENS",
        help="Tokens of the answer that a prompt stays whole for, and that judge it then.",
    ),
]
MinPrompt = Annotated[
    int | None,
    typer.Option(
        "--kv-min-prompt", metavar="TOKENS", help="Prompts shorter than this are left whole."
    ),
]
MaxWhole = Annotated[
    int | None,
    typer.Option(
        "--kv-max-whole",
        metavar="TOKENS",
        help="Prompts longer than this are packed piece by piece.",
    ),
]
Piece = Annotated[
    int | None,
    typer.Option(
        "--kv-piece", metavar="TOKENS", help="Tokens of such a prompt after which it is packed."
    ),
]
Probe = Annotated[
    int | None,
    typer.Option(
        "--kv-probe", metavar="TOKENS", help="Its last tokens, which judge each of its pieces."
    ),
]
ProbeFirst = Annotated[
    int | None,
    typer.Option(
        "--kv-probe-first",
        metavar="TOKENS",
        help="Its first tokens, which judge each of its pieces beside its last ones.",
    ),
]
DecodeBudget = Annotated[
    int | None,
    typer.Option(
        "--kv-decode-budget",
        metavar="TOKENS",
        help="Tokens per layer that a request may hold while it answers.",
    ),
]
AllowOverride = Annotated[
    str | None,
    typer.Option(
        "--kv-allow-override",
        metavar="METHODS",
        help="Methods that requests may ask for: all, or names with commas between them.",
    ),
]
BudgetBounds = Annotated[
    str | None,
    typer.Option(
        "--kv-budget-bounds",
        metavar="MIN:MAX",
        help="Budgets that requests may ask for: 0.05:0.5, 256:4096 or both.",
    ),
]
Aliases = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-alias",
        metavar="NAME=METHOD:BUDGET",
        help="Another name of the model, under which requests are compressed so. May be repeated.",
    ),
]
Everything = Annotated[
    str | None,
    typer.Option(
        "--kv-compress-config",
        metavar="JSON",
        help="Any settings, as a JSON object; the flags win over it.",
    ),
]


def settings_from(everything: str | None, **flags: Any) -> dict[str, Any]:
    """The settings that were typed, by their keys in `CompressionConfig`.

    Args:
        everything: the JSON of ``--kv-compress-config``; None where it was not given.
        flags: the other flags, by those keys; None or empty where one was not given. They win
            over `everything`.

    Raises:
        ConfigError: `everything` is no JSON object.
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
