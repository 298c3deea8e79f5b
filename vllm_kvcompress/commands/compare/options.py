"""Command-line options of ``kvcompress compare``."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="FOLDER",
        help="Start a server for this model and stop it afterwards; put flags of vllm serve"
        " after --.",
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="JSONL with a prompt per line: yours, RULER's, LongBench's or MT-Bench's.",
    ),
]
Tasks = Annotated[
    str | None,
    typer.Option("--tasks", metavar="NAMES", help="Built-in tasks, separated by commas."),
]
Length = Annotated[
    int, typer.Option("--length", min=1, help="Maximum prompt length of a task, in tokens.")
]
Count = Annotated[int, typer.Option("--count", min=1, help="Number of prompts per task.")]
Question = Annotated[
    str,
    typer.Option(
        "--question", help="Position of a task's question: last (after the text) or first."
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Random seed of the tasks.")]
Methods = Annotated[
    str,
    typer.Option("--methods", metavar="NAMES", help="Methods to compare, separated by commas."),
]
Budgets = Annotated[
    str,
    typer.Option(
        "--budgets",
        metavar="BUDGETS",
        help="Budgets to compare, separated by commas. 0.4:k4v3 is a budget with the format that"
        " --kv-packed-dtype names.",
    ),
]
Protect = Annotated[
    str | None,
    typer.Option(
        "--protect",
        metavar="PARTS",
        help="Compare each method with and without protecting these parts of a chat: system,"
        " tools, question, or several separated by commas.",
    ),
]
Lookaheads = Annotated[
    str | None,
    typer.Option(
        "--lookaheads",
        metavar="TOKENS",
        help="Compare each method with these look-aheads, separated by commas: the number of"
        " output tokens whose attention scores the prompt. 0 compresses at the end of prefill.",
    ),
]
Baselines = Annotated[
    bool,
    typer.Option(
        "--baselines/--no-baselines",
        help="Also run the baselines streamingllm and random, which a method should beat.",
    ),
]
Against = Annotated[
    list[str] | None,
    typer.Option(
        "--against",
        metavar="URL|DTYPE",
        help="Another server of the same model, for example with --kv-cache-dtype fp8. Its"
        " uncompressed outputs are compared, too. It gets the same --api-key. With --model, fp8 or"
        " another KV cache dtype starts such a server. Repeatable.",
    ),
]
MaxDrop = Annotated[
    float,
    typer.Option("--max-drop", help="Largest acceptable loss, in (0, 1), with 95 % confidence."),
]
By = Annotated[
    str | None,
    typer.Option(
        "--by",
        help="Loss measure: score, agreement or similarity. Default: score if answers are known,"
        " else similarity.",
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option(
        "--max-tokens", min=2, help="Output tokens for prompts without their own max_tokens."
    ),
]
Concurrency = Annotated[
    int, typer.Option("--concurrency", min=1, help="Number of prompts to run at once.")
]
Out = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="FOLDER",
        help="Folder for the results. Run the same command again to resume.",
    ),
]
KeepText = Annotated[
    bool, typer.Option("--keep-text", help="Also save prompts and outputs in --out.")
]
Kl = Annotated[bool, typer.Option("--kl/--no-kl", help="Also compare token probabilities.")]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", min=1, help="Seconds without data from the server before a request fails."
    ),
]
