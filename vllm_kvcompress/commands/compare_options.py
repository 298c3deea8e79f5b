"""The options of ``kvcompress compare``, as they are typed."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="FOLDER",
        help="Start a server for this model, and end it; flags of vllm serve may follow --.",
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE", help="Your own prompts, a line of JSON each."),
]
Tasks = Annotated[
    str | None,
    typer.Option("--tasks", metavar="NAMES", help="Built-in tasks, with commas between them."),
]
Length = Annotated[int, typer.Option("--length", min=1, help="Tokens of a task's prompt, at most.")]
Count = Annotated[int, typer.Option("--count", min=1, help="Prompts of each task.")]
Question = Annotated[
    str, typer.Option("--question", help="Where a task asks: last or first in its prompt.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the tasks' random numbers.")]
Methods = Annotated[
    str,
    typer.Option(
        "--methods", metavar="NAMES", help="Methods to compare, with commas between them."
    ),
]
Budgets = Annotated[
    str,
    typer.Option(
        "--budgets", metavar="BUDGETS", help="Budgets to compare, with commas between them."
    ),
]
Protect = Annotated[
    str | None,
    typer.Option(
        "--protect",
        metavar="PARTS",
        help="Also compare each method where these parts of a chat are protected: system, tools,"
        " question, or several with commas between them.",
    ),
]
Lookaheads = Annotated[
    str | None,
    typer.Option(
        "--lookaheads",
        metavar="TOKENS",
        help="Compare each method judged by so many tokens of the answer, with commas between"
        " them; 0 packs at the prefill's end.",
    ),
]
Baselines = Annotated[
    bool,
    typer.Option(
        "--baselines/--no-baselines",
        help="Show streamingllm and random beside them, which a method has to beat.",
    ),
]
MaxDrop = Annotated[
    float,
    typer.Option("--max-drop", help="Loss that you accept, in (0, 1), with 95 % confidence."),
]
By = Annotated[
    str | None,
    typer.Option(
        "--by", help="Loss of score, agreement or similarity; score where answers are known."
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option("--max-tokens", min=2, help="Tokens of an answer, where a prompt does not say."),
]
Concurrency = Annotated[int, typer.Option("--concurrency", min=1, help="Prompts at once.")]
Out = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="FOLDER",
        help="Where the run is kept; the same command goes on from there.",
    ),
]
KeepText = Annotated[bool, typer.Option("--keep-text", help="Also keep prompts and answers there.")]
Kl = Annotated[bool, typer.Option("--kl/--no-kl", help="Also compare the probabilities of tokens.")]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", min=1, help="Seconds without a word from the server that end a request."
    ),
]
