"""``kvcompress doctor``: an engine of its own or a running server, and what it prints."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from vllm_kvcompress.commands.model_shape import looks_like_hub_id
from vllm_kvcompress.commands.plan import with_method
from vllm_kvcompress.doctor import child, server_probe
from vllm_kvcompress.doctor.checks import Check, Report, Tell
from vllm_kvcompress.doctor.kept import KeptMap
from vllm_kvcompress.doctor.kept_picture import require_matplotlib, save_picture
from vllm_kvcompress.doctor.kept_text import show_kept
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.serving.exposition import Host
from vllm_kvcompress.serving.text import QUESTION, english
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.parsing import parse_budget
from vllm_kvcompress.settings.text import RepeatedKeyError, parse_json

# The picture tells so many parts of a prompt apart, and needs so many tokens to show something.
_BUCKETS = 240
_LEAST_TO_DRAW = 2048
_PICTURE = Path("kvcompress-explain.png")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was typed.

    Args:
        settings: keys of `CompressionConfig`.
        arguments: further flags of ``vllm serve``.
        expect: whether compression must be on; None where it may be either.
        picture: where to draw; None for the usual place, if anything can be drawn.
    """

    model: str | None
    url: str | None
    settings: dict[str, Any]
    arguments: tuple[str, ...]
    expect: bool | None
    tokens: int | None
    prompt_file: Path | None
    explain: bool
    picture: Path | None
    timeout_s: float
    api_key: str | None
    verbose: bool

    def __post_init__(self) -> None:
        if self.model is not None and self.url is not None:
            raise ConfigError("give a MODEL to start or the --url of a server, not both")
        if self.url is not None and self.arguments:
            raise ConfigError(
                f"flags of vllm serve are for a MODEL, and --url was given; remove {self.arguments}"
            )
        if self.explain and self.model is None:
            raise ConfigError("--explain looks into an engine of its own; give it a MODEL")
        if self.picture is not None and not self.explain:
            raise ConfigError("--picture is drawn by --explain; add that, or remove --picture")
        if self.model is None and self.url is None and (self.settings or self.arguments):
            raise ConfigError("there is nothing to try these flags on; give a MODEL or --url")
        missing = self.model is not None and not Path(self.model).expanduser().exists()
        if self.model is not None and missing and not looks_like_hub_id(self.model):
            raise ConfigError(
                f"there is no folder {self.model}; give a model's folder, or its hub name"
            )


def run(request: Request, *, as_json: bool) -> None:
    """Make the checks and print them.

    Raises:
        ConfigError: something was typed that means nothing here.
        SystemExit: 1 when a check failed.
    """
    if request.explain and request.picture is not None:
        require_matplotlib()
    console = Console(soft_wrap=False)
    report = _report(request, (lambda _: None) if as_json else _teller(console))
    picture = _draw(request, report)
    if as_json:
        payload = report.to_json() | ({"picture": str(picture)} if picture else {})
        sys.stdout.write(json.dumps(payload, indent=2) + "\n")
    else:
        _conclude(request, report, picture, console)
    raise SystemExit(report.status)


def _report(request: Request, tell: Tell) -> Report:
    text = _text(request)
    if request.url is not None:
        return server_probe.examine(
            Host(request.url, request.api_key),
            tell=tell,
            text=text,
            xargs=_request_arguments(request.settings),
            expect=request.expect,
            tokens=request.tokens,
            timeout_s=request.timeout_s,
        )
    spec = {
        "chat": _chat(request, text),
        "arguments": _arguments(request, with_method(request.settings)),
        "text": text,
        "question": f"\n\n{QUESTION}",
        "exact": request.prompt_file is not None,
        "tokens": request.tokens,
        "at_least": _LEAST_TO_DRAW if request.explain else 0,
        "buckets": _BUCKETS if request.explain else None,
    }
    report = child.examine(spec, tell=tell, timeout_s=request.timeout_s, verbose=request.verbose)
    return _as_expected(request, report, tell)


def _arguments(request: Request, settings: dict[str, Any]) -> list[str]:
    # Wrong settings are refused in our words, before anything starts.
    CompressionConfig.parse(settings)
    if request.model is None:
        return []
    own = ["--kv-compress-config", json.dumps(settings)]
    return ["--model", request.model, *own, *request.arguments]


def _as_expected(request: Request, report: Report, tell: Tell) -> Report:
    """Whether compression is on where it is expected, for an engine of its own."""
    if request.expect is None or request.model is None or not report.ok:
        return report
    is_on = not any(check.name == "compression" for check in report.checks)
    if is_on == request.expect:
        return report
    expected, actual = ("on", "off") if request.expect else ("off", "on")
    check = Check(name="expected", ok=False, detail=f"compression is {actual}, expected {expected}")
    tell(check)
    return Report(checks=[*report.checks, check], kept=report.kept)


def _text(request: Request) -> str:
    if request.prompt_file is None:
        return english()
    try:
        return request.prompt_file.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--prompt-file {request.prompt_file} is not readable ({e})") from None


def _chat(request: Request, text: str) -> dict[str, Any] | None:
    """The chat that the prompt's file has, as clients send it; None where it has a text."""
    if request.prompt_file is None or not text.lstrip().startswith("{"):
        return None
    try:
        body = parse_json(text)
    except json.JSONDecodeError:
        return None
    except RepeatedKeyError as e:
        raise ConfigError(f"--prompt-file {request.prompt_file}: {e}") from None
    messages = body.get("messages")
    roles = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    )
    if not messages or not roles or request.tokens is not None:
        raise ConfigError(
            f"--prompt-file {request.prompt_file} must have a text, or a chat's body with messages,"
            " each with its role; a chat takes no --tokens"
        )
    return {"messages": messages, "tools": body.get("tools")}


def _request_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """What the request to a server asks for itself."""
    if others := sorted(settings.keys() - {"compress", "budget"}):
        raise ConfigError(
            f"a request to a running server may ask for --kv-compress and --kv-budget; {others} are"
            " the server's own"
        )
    xargs: dict[str, Any] = {}
    if "compress" in settings:
        xargs["kv_compress"] = CompressionConfig.parse({"compress": settings["compress"]}).compress
    if "budget" in settings:
        xargs["kv_budget"] = parse_budget(settings["budget"])
    return xargs


def _draw(request: Request, report: Report) -> Path | None:
    """Save the picture, where there is something to draw and something to draw with."""
    if report.kept is None:
        return None
    path = request.picture or _PICTURE
    try:
        save_picture(KeptMap.from_json(report.kept), path)
    except ConfigError as e:
        if request.picture is not None:
            raise
        sys.stderr.write(f"kvcompress: no picture: {e}\n")
        return None
    return path


def _teller(console: Console) -> Tell:
    def tell(check: Check) -> None:
        mark = Text("ok  " if check.ok else "FAIL", style="green" if check.ok else "bold red")
        line = Text.assemble(mark, f" {check.name:<12} ", check.detail)
        console.print(line, soft_wrap=True)

    return tell


def _conclude(request: Request, report: Report, picture: Path | None, console: Console) -> None:
    if report.kept is not None:
        console.print()
        show_kept(KeptMap.from_json(report.kept), console)
    if picture is not None:
        console.print(f"Drawn in {picture}.", highlight=False, soft_wrap=True)
    if report.ok and request.model is None and request.url is None:
        console.print("Nothing was run: give a MODEL or --url to prove that it compresses.")
    if not report.ok:
        failed = [check.name for check in report.checks if not check.ok]
        console.print(f"Not well: {', '.join(failed)}.", highlight=False)
