"""Command-line options of ``kvcompress compare``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from vllm_kvcompress.commands.options import AS_JSON, KEY, URL


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Options of ``kvcompress compare``. Each option's help describes it."""

    context: typer.Context
    """Its further arguments are flags of ``vllm serve``."""
    url: Annotated[str | None, URL] = None
    model: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Start a server for this model and stop it afterwards; put flags of vllm serve"
            " after --.",
        ),
    ] = None
    prompts: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="JSONL with a prompt per line: yours, RULER's, LongBench's or MT-Bench's.",
        ),
    ] = None
    tasks: Annotated[
        str | None, Option(metavar="NAMES", help="Built-in tasks, separated by commas.")
    ] = None
    length: Annotated[int, Option(min=1, help="Maximum prompt length of a task, in tokens.")] = 4096
    count: Annotated[int, Option(min=1, help="Number of prompts per task.")] = 150
    question: Annotated[
        str, Option(help="Position of a task's question: last (after the text) or first.")
    ] = "last"
    seed: Annotated[int, Option(help="Random seed of the tasks.")] = 0
    methods: Annotated[
        str, Option(metavar="NAMES", help="Methods to compare, separated by commas.")
    ] = "cake-chunk,cake,snapkv"
    budgets: Annotated[
        str,
        Option(
            metavar="BUDGETS",
            help="Budgets to compare, separated by commas. 0.4:k4v3 is a budget with the format"
            " that --kv-packed-dtype names.",
        ),
    ] = "0.5,0.2,0.1"
    protect: Annotated[
        str | None,
        Option(
            metavar="PARTS",
            help="Compare each method with and without protecting these parts of a chat: system,"
            " tools, question, or several separated by commas.",
        ),
    ] = None
    lookaheads: Annotated[
        str | None,
        Option(
            metavar="TOKENS",
            help="Compare each method with these look-aheads, separated by commas: the number of"
            " output tokens whose attention scores the prompt. 0 compresses at the end of"
            " prefill.",
        ),
    ] = None
    baselines: Annotated[
        bool,
        Option(
            "--baselines/--no-baselines",
            help="Also run the baselines streamingllm and random, which a method should beat.",
        ),
    ] = True
    against: Annotated[
        list[str] | None,
        Option(
            metavar="URL|DTYPE",
            help="Another server of the same model, for example with --kv-cache-dtype fp8. Its"
            " uncompressed outputs are compared, too. It gets the same --api-key. With --model, fp8"
            " or another KV cache dtype starts such a server. Repeatable.",
        ),
    ] = None
    max_drop: Annotated[
        float, Option(help="Largest acceptable loss, in (0, 1), with 95 % confidence.")
    ] = 0.02
    by: Annotated[
        str | None,
        Option(
            help="Loss measure: score, agreement or similarity. Default: score if answers are"
            " known, else similarity."
        ),
    ] = None
    max_tokens: Annotated[
        int, Option(min=2, help="Output tokens for prompts without their own max_tokens.")
    ] = 128
    concurrency: Annotated[int, Option(min=1, help="Number of prompts to run at once.")] = 2
    out: Annotated[
        Path,
        Option(
            metavar="FOLDER", help="Folder for the results. Run the same command again to resume."
        ),
    ] = Path("kvcompress-compare")
    keep_text: Annotated[
        bool, Option("--keep-text", help="Also save prompts and outputs in --out.")
    ] = False
    kl: Annotated[bool, Option("--kl/--no-kl", help="Also compare token probabilities.")] = True
    timeout: Annotated[
        float, Option(min=1, help="Seconds without data from the server before a request fails.")
    ] = 600.0
    api_key: Annotated[str | None, KEY] = None
    as_json: Annotated[bool, AS_JSON] = False
