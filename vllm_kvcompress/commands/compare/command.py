"""``kvcompress compare``: find the method and budget that your own prompts tolerate."""

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, cast, get_args

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vllm_kvcompress.commands.compare.options import CompareOptions
from vllm_kvcompress.compare import prompts, server
from vllm_kvcompress.compare.client import Cell, Client
from vllm_kvcompress.compare.comparison import Comparison
from vllm_kvcompress.compare.journal import Journal, replace_file
from vllm_kvcompress.compare.limits import find_limits, planned_lines, planned_tasks
from vllm_kvcompress.compare.picture import draw, why_empty
from vllm_kvcompress.compare.preflight import check_servers
from vllm_kvcompress.compare.report import TABLES, Column, Report, markdown, rule_columns
from vllm_kvcompress.compare.summary import Measure
from vllm_kvcompress.compare.tasks import TASKS, CountTokens, Item, QuestionAt, build_items
from vllm_kvcompress.errors import ConfigError, KVCompressError
from vllm_kvcompress.methods.base import choose
from vllm_kvcompress.methods.registry import PRESETS
from vllm_kvcompress.planning.cache_dtypes import LOW_BIT_CACHES
from vllm_kvcompress.serving.exposition import Host, Refused
from vllm_kvcompress.settings.packed_dtype import AUTO
from vllm_kvcompress.settings.parsing import parse_budget_and_format
from vllm_kvcompress.settings.protection import NONE, WORDS, parse_protect

_INTERRUPTED = 130
_LOG, _CHART = "server.log", "report.png"
_BASELINES = ("streamingllm", "random")
"""Methods that choose tokens without reading the prompt."""
_CHARACTERS_PER_TOKEN = 4
"""Estimate for English text, used if the server has no tokenizer endpoint."""


def run(options: CompareOptions) -> None:
    """Run the comparison, write the report files and print the report.

    Raises:
        ConfigError: An argument is invalid, or the server refuses a cell.
        Unreachable: The server does not respond.
        SystemExit: 0 with a recommendation, 1 without one, 2 if the server was lost or the disk
            became full during the run, 130 if interrupted. Finished results are kept.
    """
    _check(options)
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    by = cast(Measure | None, options.by)
    file_items: list[Item] = []
    if options.prompts is not None:
        file_items = prompts.read_prompts(options.prompts, max_tokens=options.max_tokens)
    cells = _cells(options)
    baselines = _baseline_cells(cells) if options.baselines else []
    names = [] if options.tasks is None else _parts("--tasks", options.tasks)
    for name in names:
        choose("task", TASKS, name)
    planned = planned_lines(file_items) or planned_tasks(names, options.count)
    for sentence in find_limits(planned, by=by, max_drop=options.max_drop):
        console.print(f"kvcompress: {sentence}")
    comparison: Comparison | None = None
    failure: KVCompressError | None = None
    interrupted = False
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _interrupt))
        journal = stack.enter_context(Journal(options.out, keep_text=options.keep_text))
        try:
            url = _start_server(options, [*cells, *baselines], stack, console)
            host = Host(url, options.api_key)
            others = {
                other: Host(_start_other(options, other, stack, console), options.api_key,
                            "--against")
                for other in options.against or ()
            }  # fmt: skip
            client = Client(host=host, model="", timeout_s=options.timeout)
            servers = check_servers(client, cells, baselines, others)
            items, notes = file_items, list[str]()
            if names:
                items, notes = _task_items(options, names, servers.client)
            settings = _settings(options, names, servers.client.model)
            comparison = Comparison(journal, servers, items, settings, kl=options.kl, notes=notes)
            _run_with_progress(comparison, options.concurrency, console)
        except KeyboardInterrupt:
            interrupted = True
        except KVCompressError as e:
            if comparison is None:
                raise
            failure = e
        if comparison is None:
            console.print("kvcompress: interrupted before any prompt was sent.")
            raise SystemExit(_INTERRUPTED)
        report = comparison.report(by=by, max_drop=options.max_drop)
    try:
        _write(report, options.out, console, private=options.keep_text)
    except OSError as e:
        # Still print the report.
        failure = failure or ConfigError(
            f"the report cannot be written to {options.out} ({e}); free some disk space"
        )
    if options.as_json:
        sys.stdout.write(json.dumps(report.to_json(), indent=2) + "\n")
    else:
        _print_report(report, options.out)
    saved = (
        f"{comparison.num_done} of {comparison.num_total} results are saved in {options.out}; run"
        " the same command to resume."
    )
    if failure is not None:
        if options.model is not None:
            saved += f" The server's log is {options.out / _LOG}."
        console.print(f"kvcompress: error: {str(failure).removesuffix('.')}. {saved}")
        raise SystemExit(2)
    if interrupted:
        console.print(f"kvcompress: interrupted; {saved}")
        raise SystemExit(_INTERRUPTED)
    raise SystemExit(0 if report.recommendation.cell is not None else 1)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


# -- options --------------------------------------------------------------------------------------


def _check(options: CompareOptions) -> None:
    """Raise ConfigError if the options contradict each other."""
    for flag, text, allowed in (
        ("--question", options.question, get_args(QuestionAt)),
        ("--by", options.by, get_args(Measure)),
    ):
        if text is not None and text not in allowed:
            raise ConfigError(f"{flag} must be one of {', '.join(allowed)}, got {text!r}")
    model, against = options.model, options.against or []
    if (options.url is None) == (model is None):
        raise ConfigError("give either --url (a running server) or --model (a folder)")
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(
            f"--model must be a model folder that contains a config.json, got {model}"
        )
    if options.url is not None and options.context.args:
        raise ConfigError(
            f"flags of vllm serve need --model, got --url; remove {' '.join(options.context.args)}"
        )
    if (options.prompts is None) == (options.tasks is None):
        raise ConfigError(f"give either --prompts or --tasks; the tasks are {', '.join(TASKS)}")
    for other in against:
        if other not in LOW_BIT_CACHES:
            # Checked here, because --model starts a server before the address is used.
            Host(other, flag="--against")
        elif model is None:
            raise ConfigError(
                f"--against {other} starts a server and needs --model; start one yourself with"
                f" --kv-cache-dtype {other}, and give its address"
            )
    urls = [url.rstrip("/") for url in (*against, options.url or "")]
    if len(set(urls)) < len(urls):
        raise ConfigError(
            "--against must name other servers than --url, each once; got"
            f" {', '.join(against)}{f' and --url {options.url}' if options.url else ''}; remove the"
            " repeated one"
        )
    if not 0 < options.max_drop < 1:
        raise ConfigError(f"--max-drop must be in (0, 1), got {options.max_drop:g}")


def _cells(options: CompareOptions) -> list[Cell]:
    """Return every combination of method, look-ahead, protection and budget, in that order.

    Raises:
        ConfigError: A name or number is invalid, or budgets mix ratios and tokens.
    """
    methods = _parts("--methods", options.methods)
    for method in methods:
        choose("method", PRESETS, method)
    # Each budget may name a format, as in 0.4:k4v3.
    budgets = [parse_budget_and_format(text) for text in _parts("--budgets", options.budgets)]
    if len({type(budget) for budget, _ in budgets}) > 1:
        raise ConfigError(
            "--budgets must be all ratios or all whole numbers of tokens, because ratios and"
            f" tokens cannot be ranked together; got {options.budgets}"
        )
    protections = [""] if options.protect is None else [NONE, _protected_parts(options.protect)]
    lookaheads = [None] if options.lookaheads is None else _whole_numbers(options.lookaheads)
    # If one budget names a format, the others have the KV cache's dtype.
    default_format = AUTO if any(packed_dtype for _, packed_dtype in budgets) else ""
    return [
        Cell(
            method=method,
            budget=budget,
            protect=protect,
            lookahead=lookahead,
            packed_dtype=packed_dtype or default_format,
        )
        for method in methods
        for lookahead in lookaheads
        for protect in protections
        for budget, packed_dtype in dict.fromkeys(budgets)
    ]


def _baseline_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Return the baselines that no cell has as its method, at every budget and format."""
    named = {cell.method for cell in cells}
    kept = dict.fromkeys((cell.budget, cell.packed_dtype) for cell in cells)
    return [
        Cell(method=method, budget=budget, packed_dtype=packed_dtype)
        for method in _BASELINES
        if method not in named
        for budget, packed_dtype in kept
    ]


def _protected_parts(protect: str) -> str:
    words, spans = parse_protect("--protect", protect)
    if spans or not words:
        raise ConfigError(
            f"--protect must name some of {', '.join(WORDS)}, separated by commas; token spans"
            f" differ between prompts and are not allowed here, got {protect!r}"
        )
    return ",".join(words)


def _whole_numbers(text: str) -> list[int]:
    parts = _parts("--lookaheads", text)
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(
            "--lookaheads must be whole numbers of output tokens, 0 or more, separated by commas;"
            f" got {text!r}"
        )
    return list(dict.fromkeys(map(int, parts)))


def _parts(flag: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"{flag} must have at least one value, separated by commas; got {text!r}")
    return list(dict.fromkeys(parts))


# -- the run --------------------------------------------------------------------------------------


def _start_server(
    options: CompareOptions, cells: Sequence[Cell], stack: ExitStack, console: Console
) -> str:
    """Return the URL of the running server, or of one that runs until `stack` exits."""
    if options.model is None:
        return str(options.url)
    log = options.out / _LOG
    console.print(f"Starting vllm serve {options.model}; its log is {log} ...")
    arguments = tuple(options.context.args)
    return stack.enter_context(server.start(options.model, arguments, cells, log))


def _start_other(options: CompareOptions, other: str, stack: ExitStack, console: Console) -> str:
    """Return the URL `other`, or of a server with the KV cache dtype `other`."""
    if options.model is None or other not in LOW_BIT_CACHES:
        return other
    log = options.out / f"server-{other}.log"
    console.print(f"Starting vllm serve {options.model} --kv-cache-dtype {other}; its log is {log}")
    arguments = tuple(options.context.args)
    return stack.enter_context(server.start_low_bit(options.model, other, arguments, log))


def _task_items(
    options: CompareOptions, names: Sequence[str], client: Client
) -> tuple[list[Item], list[str]]:
    """Return the prompts of the tasks, and notes."""
    count_tokens: CountTokens = client.count_tokens
    notes = []
    try:
        client.count_tokens("one two three")
    except Refused:
        count_tokens = _estimate_tokens
        notes.append(
            "The server has no /tokenize endpoint: --length is estimated at"
            f" {_CHARACTERS_PER_TOKEN} characters per token."
        )
    items = build_items(
        names,
        count=options.count,
        tokens=options.length,
        seed=options.seed,
        question=cast(QuestionAt, options.question),
        count_tokens=count_tokens,
        # Several questions about one text count as one independent sample.
        questions_per_text=1,
    )
    return items, notes


def _estimate_tokens(text: str) -> int:
    return len(text) // _CHARACTERS_PER_TOKEN


def _settings(options: CompareOptions, names: Sequence[str], model: str) -> Mapping[str, Any]:
    """Return the settings that an earlier run must share to be resumed."""
    settings = {"model": model, "concurrency": options.concurrency, "kl": options.kl}
    if not names:
        return settings
    return settings | {
        "tasks": names,
        "length": options.length,
        "count": options.count,
        "seed": options.seed,
        "question": options.question,
    }


def _run_with_progress(comparison: Comparison, concurrency: int, console: Console) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    num_done, num_total = comparison.num_done, comparison.num_total
    if num_done:
        console.print(f"Resuming: {num_done} of {num_total} results were saved earlier.")
    # Without a terminal, a line after each tenth of the results replaces the progress bar.
    no_terminal = not console.is_terminal
    with (
        Progress(*columns, console=console, transient=True, disable=no_terminal) as progress,
        closing(comparison.run(concurrency)) as results,
    ):
        bar = progress.add_task("running", total=num_total, completed=num_done)
        for count, cell in enumerate(results, num_done + 1):
            progress.update(bar, completed=count, description=str(cell))
            if no_terminal and count * 10 // num_total > (count - 1) * 10 // num_total:
                console.print(f"{count} of {num_total} results are done.")


# -- the report -----------------------------------------------------------------------------------


def _write(report: Report, folder: Path, console: Console, *, private: bool) -> None:
    """Write the report's files.

    Args:
        private: only their owner can read them, because the server's reasons may quote prompts.
    """
    files = {
        "report.json": f"{json.dumps(report.to_json(), indent=2)}\n",
        "report.md": markdown(report),
    }
    for name, text in files.items():
        replace_file(folder / name, text.encode(), private=private)
    # The chart of an earlier run would contradict this report.
    (folder / _CHART).unlink(missing_ok=True)
    if reason := why_empty(report):
        console.print(f"kvcompress: no chart: {reason}")
        return
    try:
        replace_file(folder / _CHART, draw(report), private=private)
    except ImportError:
        console.print("kvcompress: no chart, because matplotlib is missing; pip install matplotlib")
    except OSError as e:
        console.print(f"kvcompress: no chart: {e}")


def _print_report(report: Report, folder: Path) -> None:
    # The server's reason may contain brackets, which rich would read as markup.
    console = Console(highlight=False, markup=False)
    console.print(report.title, style="bold")
    for columns in TABLES.values():
        console.print(_table(columns, report))
    if any(summary.obeyed for summary in report.summaries):
        console.print(_table(rule_columns(report.summaries, by_rule=False), report))
    # Without a terminal, keep each sentence on one line.
    soft_wrap = not console.is_terminal
    for note in report.notes:
        console.print(note, soft_wrap=soft_wrap)
    style = "bold green" if report.recommendation.cell is not None else "bold red"
    console.print(report.recommendation.sentence, style=style, soft_wrap=soft_wrap)
    console.print(f"{folder / 'report.md'} explains the figures.", soft_wrap=soft_wrap)


def _table(columns: Sequence[Column], report: Report) -> Table:
    table = Table(box=box.HORIZONTALS, header_style="bold", collapse_padding=True, pad_edge=False)
    # Intervals are in report.md only: they do not fit a terminal.
    rows = [[column.text(s).partition(" [")[0] for column in columns] for s in report.summaries]
    for row in rows:
        # A space after each comma lets the list of protected parts wrap.
        row[0] = row[0].replace(",", ", ")
    # Names must not be cut: a cut cake-chunk would read as cake.
    table.add_column(
        columns[0].name, min_width=max(len(word) for row in rows for word in row[0].split())
    )
    for number, column in enumerate(columns[1:], 1):
        # Headings may wrap, figures must not.
        parts = [*column.name.split(), *(row[number] for row in rows)]
        table.add_column(column.name, justify="right", width=max(map(len, parts)))
    in_baselines = False
    for summary, row in zip(report.summaries, rows, strict=True):
        if summary.baseline and not in_baselines:
            table.add_section()
            in_baselines = True
        table.add_row(*row, style="dim" if summary.baseline else None)
    return table
