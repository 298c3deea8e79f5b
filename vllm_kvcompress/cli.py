"""``kvcompress``: what operators ask before they serve, while they serve, and when it looks wrong.

Each command imports what it needs itself: ``health`` starts in a fraction of a second.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from vllm_kvcompress.commands import compare_options as compared
from vllm_kvcompress.commands import kv_flags
from vllm_kvcompress.commands.options import PlainNumbers, takes
from vllm_kvcompress.commands.plan_options import PlanOptions
from vllm_kvcompress.errors import KVCompressError

app = typer.Typer(
    name="kvcompress",
    help=__doc__.splitlines()[0].partition(": ")[2].capitalize(),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AS_JSON = typer.Option("--json", help="Print one JSON document and nothing else.")
URL = typer.Option("--url", metavar="URL", help="A running server, such as http://127.0.0.1:8000.")
KEY = typer.Option(
    "--api-key", envvar="VLLM_API_KEY", help="The server's API key, where it wants one."
)


def _print_versions(asked: bool) -> None:
    """Print our version and the installed vLLM's, by its metadata: importing it takes seconds."""
    if not asked:
        return
    from vllm_kvcompress import __version__
    from vllm_kvcompress.engine.startup.import_failures import installed_vllm

    typer.echo(f"vllm-kvcompress {__version__}, vLLM {installed_vllm() or 'not installed'}")
    raise typer.Exit


@app.callback()
def _for_every_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_versions,
            is_eager=True,
            help="Print the plugin's version and the installed vLLM's, and exit.",
        ),
    ] = False,
) -> None:
    pass


@app.command(cls=PlainNumbers)
@takes(PlanOptions)
def plan(options: PlanOptions) -> None:
    """What a request takes, and how many fit, with and without compression. Needs no vLLM."""
    from vllm_kvcompress.commands.plan import ask

    found = ask(options)
    if options.as_json:
        _print_json(found.to_json())
    else:
        found.show()


@app.command(cls=PlainNumbers, context_settings={"allow_extra_args": True})
def doctor(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="A model to start; flags of vllm serve may follow --.")
    ] = None,
    url: Annotated[str | None, URL] = None,
    method: kv_flags.Compress = None,
    budget: kv_flags.Budget = None,
    window: kv_flags.Window = None,
    min_prompt: kv_flags.MinPrompt = None,
    everything: kv_flags.Everything = None,
    expect: Annotated[
        str | None,
        typer.Option(help="on or off: what the server must have. Anything else is a failure."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of the prompt; just long enough by itself.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="The prompt instead of one that is built in: a text, or the body of a chat."
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also draw what each layer kept, and where.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="PNG file for --explain; kvcompress-explain.png by itself.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for all of it.")] = 900.0,
    api_key: Annotated[str | None, KEY] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's log on stderr.")] = False,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Check the installation, and prove with one prompt that compression runs.

    With MODEL in an engine of its own, with --url on a running server. Exits with 1 when
    compression is on and did not run, or when any other check fails.
    """
    from vllm_kvcompress.commands import doctor as command

    settings = kv_flags.settings_from(
        everything, compress=method, budget=budget, window=window, min_prompt=min_prompt
    )
    command.run(
        command.Request(
            model=model,
            url=url,
            settings=settings,
            arguments=tuple(context.args),
            expect=_on_or_off(expect),
            tokens=tokens,
            prompt_file=prompt_file,
            explain=explain,
            picture=picture,
            timeout_s=timeout,
            api_key=api_key,
            verbose=verbose,
        ),
        as_json=as_json,
    )


@app.command(cls=PlainNumbers, context_settings={"allow_extra_args": True})
def compare(
    context: typer.Context,
    url: Annotated[str | None, URL] = None,
    model: compared.Model = None,
    prompts: compared.Prompts = None,
    tasks: compared.Tasks = None,
    length: compared.Length = 4096,
    count: compared.Count = 150,
    question: compared.Question = "last",
    seed: compared.Seed = 0,
    methods: compared.Methods = "cake-chunk,cake,snapkv",
    budgets: compared.Budgets = "0.5,0.2,0.1",
    protect: compared.Protect = None,
    lookaheads: compared.Lookaheads = None,
    baselines: compared.Baselines = True,
    max_drop: compared.MaxDrop = 0.02,
    by: compared.By = None,
    max_tokens: compared.MaxTokens = 128,
    concurrency: compared.Concurrency = 2,
    out: compared.Out = Path("kvcompress-compare"),
    keep_text: compared.KeepText = False,
    kl: compared.Kl = True,
    timeout: compared.Timeout = 600.0,
    api_key: Annotated[str | None, KEY] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Which method and budget your own prompts take. With --url it needs no vLLM.

    Exits with 0 when one is within --max-drop, 1 when none is, 2 on wrong usage and where the
    server is lost, 130 when interrupted. What was done is kept.
    """
    from vllm_kvcompress.commands import compare as command

    command.run(
        command.Request(
            url=url,
            model=model,
            arguments=tuple(context.args),
            prompts=prompts,
            tasks=tasks,
            length=length,
            count=count,
            question=_one_of("--question", question, ("last", "first")),
            seed=seed,
            methods=methods,
            budgets=budgets,
            protect=protect,
            lookaheads=lookaheads,
            baselines=baselines,
            max_drop=max_drop,
            by=None if by is None else _one_of("--by", by, ("score", "agreement", "similarity")),
            max_tokens=max_tokens,
            concurrency=concurrency,
            out=out,
            keep_text=keep_text,
            kl=kl,
            api_key=api_key,
            timeout_s=timeout,
        ),
        as_json=as_json,
    )


@app.command(cls=PlainNumbers)
def health(
    url: Annotated[str, URL] = "http://127.0.0.1:8000",
    after: Annotated[
        int, typer.Option(min=1, help="Prompts that must be planned before none done is a failure.")
    ] = 5,
    expect: Annotated[
        bool | None,
        typer.Option(
            "--expect-compression/--ignore-compression",
            help="Fail where compression is off, or look at nothing but the server's own health.",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 5.0,
    api_key: Annotated[str | None, KEY] = None,
) -> None:
    """One sentence and status 0 or 1, for a container's health check. Needs no vLLM."""
    from vllm_kvcompress.commands.health import health as ask
    from vllm_kvcompress.serving.exposition import Host

    ok, sentence = ask(Host(url, api_key), after=after, expect=expect, timeout_s=timeout)
    typer.echo(sentence)
    raise typer.Exit(0 if ok else 1)


def _on_or_off(text: str | None) -> bool | None:
    if text not in (None, "on", "off"):
        _wrong(f"--expect must be on or off, got {text!r}")
    return None if text is None else text == "on"


def _one_of(flag: str, text: str, allowed: tuple[str, ...]) -> Any:
    if text not in allowed:
        _wrong(f"{flag} must be one of {', '.join(allowed)}, got {text!r}")
    return text


def _print_json(found: dict[str, Any]) -> None:
    typer.echo(json.dumps(found, indent=2))


def _wrong(message: str) -> NoReturn:
    typer.echo(f"kvcompress: error: {message}", err=True)
    raise SystemExit(2)


def main() -> None:
    """The command's entry point: what we refuse is one sentence and status 2."""
    try:
        app()
    except KVCompressError as e:
        _wrong(str(e))
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
