"""``kvcompress``: plan, check and compare KV-cache compression for vLLM.

Each command imports its implementation when it runs, so that ``health`` starts in a fraction of a
second.
"""

import json
import sys
from typing import Annotated

import typer

from vllm_kvcompress.commands.compare.options import CompareOptions
from vllm_kvcompress.commands.doctor_options import DoctorOptions
from vllm_kvcompress.commands.options import AS_JSON, KEY, URL, PlainNumbers, takes_options
from vllm_kvcompress.commands.plan.options import PlanOptions
from vllm_kvcompress.errors import KVCompressError

app = typer.Typer(
    name="kvcompress",
    help="Plan, check and compare KV-cache compression for vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_versions(requested: bool) -> None:
    """Print the versions of the plugin and of vLLM, and exit.

    Reads vLLM's version from its package metadata, because importing vLLM takes seconds.
    """
    if not requested:
        return
    from vllm_kvcompress import __version__
    from vllm_kvcompress.engine.startup.import_failures import installed_vllm

    typer.echo(f"vllm-kvcompress {__version__}, vLLM {installed_vllm() or 'not installed'}")
    raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_versions,
            is_eager=True,
            help="Print the versions of the plugin and of vLLM, and exit.",
        ),
    ] = False,
) -> None:
    pass


@app.command(cls=PlainNumbers)
@takes_options(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Show the KV memory of a request and how many fit, with and without compression.

    Needs no vLLM and no GPU.
    """
    from vllm_kvcompress.commands.plan.command import make_plan
    from vllm_kvcompress.commands.plan.report import show_plan

    result = make_plan(options)
    if options.as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        show_plan(result)


@app.command(cls=PlainNumbers, context_settings={"allow_extra_args": True})
@takes_options(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Check the installation, and run one prompt to check that compression works.

    Starts an engine for MODEL, or checks a running server with --url. Exits with 1 if compression
    is on but did not run, or if any other check fails.
    """
    from vllm_kvcompress.commands.doctor import run

    run(options)


@app.command(cls=PlainNumbers, context_settings={"allow_extra_args": True})
@takes_options(CompareOptions)
def compare(options: CompareOptions) -> None:
    """Find the method and budget that your own prompts tolerate. With --url, needs no vLLM.

    Exits with 0 if a method's loss is within --max-drop, 1 if none is, 2 for an invalid argument
    or a lost server, and 130 if interrupted. Finished results are kept.
    """
    from vllm_kvcompress.commands.compare import command

    command.run(options)


@app.command()
def methods(as_json: Annotated[bool, AS_JSON] = False) -> None:
    """List the methods and their parts, with those that other packages add. Needs no vLLM.

    Exits with 1 if a package's entry is wrong. Then the server refuses to compress as well.
    """
    from vllm_kvcompress.commands import methods as command

    command.run(as_json=as_json)


@app.command(cls=PlainNumbers)
def health(
    url: Annotated[str, URL] = "http://127.0.0.1:8000",
    after: Annotated[
        int,
        typer.Option(min=1, help="Fail if this many prompts were planned and none was compressed."),
    ] = 5,
    expect: Annotated[
        bool | None,
        typer.Option(
            "--expect-compression/--ignore-compression",
            help="Fail if compression is off, or check only that the server responds.",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the server.")] = 5.0,
    api_key: Annotated[str | None, KEY] = None,
) -> None:
    """Print one sentence and exit with 0 or 1, for a container's health check. Needs no vLLM."""
    from vllm_kvcompress.commands.health import health as check_health
    from vllm_kvcompress.serving.exposition import Host

    ok, sentence = check_health(Host(url, api_key), after=after, expect=expect, timeout_s=timeout)
    typer.echo(sentence)
    raise typer.Exit(0 if ok else 1)


def main() -> None:
    """Run the command. Errors of ours are printed as one sentence, with exit status 2."""
    try:
        app()
    except KVCompressError as e:
        typer.echo(f"kvcompress: error: {e}", err=True)
        raise SystemExit(2) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
