"""``kvcompress doctor``: check an installation, a model in a child process, or a running server."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from vllm_kvcompress.commands.doctor_options import DoctorOptions
from vllm_kvcompress.doctor import child_process, server_probe
from vllm_kvcompress.doctor.checks import Check, CheckCallback, Report
from vllm_kvcompress.doctor.kept import KeptMap, require_matplotlib, save_picture, show_kept
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.planning.model_traits import looks_like_hub_id
from vllm_kvcompress.serving.exposition import Host
from vllm_kvcompress.serving.text import QUESTION, english
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.packed_dtype import parse_packed_dtype
from vllm_kvcompress.settings.parsing import parse_budget, with_default_method
from vllm_kvcompress.settings.text import RepeatedKeyError, parse_json

# Bins of prompt positions in the picture, and the fewest tokens that make it readable.
_BUCKETS = 240
_MIN_TOKENS_TO_DRAW = 2048
_PICTURE = Path("kvcompress-explain.png")


def run(options: DoctorOptions) -> None:
    """Run the checks and print their results.

    Raises:
        ConfigError: An argument is invalid.
        SystemExit: 0 if every check passed, else 1.
    """
    model = options.model
    if model is not None and not Path(model).expanduser().exists() and not looks_like_hub_id(model):
        raise ConfigError(
            f"there is no folder {model}; give a model folder or a Hugging Face model name"
        )
    if options.explain and options.picture is not None:
        require_matplotlib()
    console = Console(soft_wrap=False)
    report = _report(options, (lambda _: None) if options.as_json else _check_printer(console))
    picture = _save_picture(options, report)
    if options.as_json:
        payload = report.to_json() | ({"picture": str(picture)} if picture else {})
        sys.stdout.write(json.dumps(payload, indent=2) + "\n")
    else:
        _print_summary(options, report, picture, console)
    raise SystemExit(report.status)


def _report(options: DoctorOptions, on_check: CheckCallback) -> Report:
    text = _prompt_text(options)
    if options.url is not None:
        return server_probe.examine(
            Host(options.url, options.api_key),
            on_check=on_check,
            text=text,
            xargs=_request_xargs(options.settings),
            expect=options.expects_compression,
            tokens=options.tokens,
            timeout_s=options.timeout,
        )
    spec = {
        "chat": _chat(options, text),
        "arguments": _engine_arguments(options, with_default_method(options.settings)),
        "text": text,
        "question": f"\n\n{QUESTION}",
        "exact": options.prompt_file is not None,
        "tokens": options.tokens,
        "at_least": _MIN_TOKENS_TO_DRAW if options.explain else 0,
        "buckets": _BUCKETS if options.explain else None,
    }
    report = child_process.examine(
        spec, on_check=on_check, timeout_s=options.timeout, verbose=options.verbose
    )
    return _with_expectation(options, report, on_check)


def _engine_arguments(options: DoctorOptions, settings: dict[str, Any]) -> list[str]:
    if options.model is None:
        return []
    # Report invalid settings with our own message before an engine starts.
    CompressionConfig.parse(settings)
    compression = ["--kv-compress-config", json.dumps(settings)]
    return ["--model", options.model, *compression, *options.arguments]


def _with_expectation(options: DoctorOptions, report: Report, on_check: CheckCallback) -> Report:
    """Return the report with a failed check if compression is not as ``--expect`` requires."""
    if options.expects_compression is None or options.model is None or not report.ok:
        return report
    is_on = not any(check.name == "compression" for check in report.checks)
    if is_on == options.expects_compression:
        return report
    expected, actual = ("on", "off") if options.expects_compression else ("off", "on")
    check = Check(name="expected", ok=False, detail=f"compression is {actual}, expected {expected}")
    on_check(check)
    return Report(checks=[*report.checks, check], kept=report.kept)


def _prompt_text(options: DoctorOptions) -> str:
    if options.prompt_file is None:
        return english()
    try:
        return options.prompt_file.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--prompt-file {options.prompt_file} cannot be read ({e})") from None


def _chat(options: DoctorOptions, text: str) -> dict[str, Any] | None:
    """Return the chat in the prompt file, or None if the file is plain text."""
    if options.prompt_file is None or not text.lstrip().startswith("{"):
        return None
    try:
        body = parse_json(text)
    except json.JSONDecodeError:
        return None
    except RepeatedKeyError as e:
        raise ConfigError(f"--prompt-file {options.prompt_file}: {e}") from None
    messages = body.get("messages")
    has_roles = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    )
    if not messages or not has_roles or options.tokens is not None:
        raise ConfigError(
            f"--prompt-file {options.prompt_file} must be a text, or a chat body whose messages"
            " each have a role; with a chat, remove --tokens"
        )
    return {"messages": messages, "tools": body.get("tools")}


def _request_xargs(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the ``vllm_xargs`` for the request to a running server."""
    if unsupported := sorted(settings.keys() - {"compress", "budget", "packed_dtype"}):
        raise ConfigError(
            "with --url, a request can only set --kv-compress, --kv-budget and --kv-packed-dtype;"
            f" the server sets {unsupported}, so remove them"
        )
    xargs: dict[str, Any] = {}
    if "compress" in settings:
        xargs["kv_compress"] = CompressionConfig.parse({"compress": settings["compress"]}).compress
    if "budget" in settings:
        xargs["kv_budget"] = parse_budget(settings["budget"])
    if "packed_dtype" in settings:
        xargs["kv_packed_dtype"] = parse_packed_dtype(settings["packed_dtype"])
    return xargs


def _save_picture(options: DoctorOptions, report: Report) -> Path | None:
    """Return the saved picture, or None without data or, unless --picture is given, matplotlib."""
    if report.kept is None:
        return None
    path = options.picture or _PICTURE
    try:
        save_picture(KeptMap.from_json(report.kept), path)
    except ConfigError as e:
        if options.picture is not None:
            raise
        sys.stderr.write(f"kvcompress: no picture: {e}\n")
        return None
    return path


def _check_printer(console: Console) -> CheckCallback:
    def on_check(check: Check) -> None:
        mark = Text("ok  " if check.ok else "FAIL", style="green" if check.ok else "bold red")
        line = Text.assemble(mark, f" {check.name:<12} ", check.detail)
        console.print(line, soft_wrap=True)

    return on_check


def _print_summary(
    options: DoctorOptions, report: Report, picture: Path | None, console: Console
) -> None:
    if report.kept is not None:
        console.print()
        show_kept(KeptMap.from_json(report.kept), console)
    if picture is not None:
        console.print(f"Picture saved in {picture}.", highlight=False, soft_wrap=True)
    if report.ok and options.model is None and options.url is None:
        console.print("No prompt was run: give MODEL or --url to check that compression works.")
    if not report.ok:
        failed = [check.name for check in report.checks if not check.ok]
        console.print(f"Failed checks: {', '.join(failed)}.", highlight=False)
