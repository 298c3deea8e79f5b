"""Whether a server can be compared with itself: asked before any prompt is."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_kvcompress.compare.client import FULL, Cell, Client
from vllm_kvcompress.compare.tasks import Item
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.serving.exposition import Host, Metrics, Refused, Unreachable, error_message
from vllm_kvcompress.settings.request_keys import BY_ROLE

_QUICK_S = 10.0
_TOPS = (20, 5, 1, 0)
_TINY = Item(
    name="preflight",
    task="preflight",
    messages=({"role": "user", "content": "Count to nine."},),
    answers=(),
    max_tokens=4,
)
_DECISIVE = ("method", "window", "min_prompt", "min_output", "pressure")
"""Settings of a server that decide what a request is answered, whatever it asks for itself."""
_NO_SUCH = Cell(method="no-such-method")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a server is and lets us see.

    Args:
        client: to ask it with.
        settings: of it, those that change what an answer is; none where it does not say.
        baselines: of the cells that were to stand beside, those that it takes.
        notes: what the report must say of it, a sentence each.
    """

    client: Client
    settings: Mapping[str, str]
    baselines: Sequence[Cell]
    notes: Sequence[str]


def look(client: Client, cells: Sequence[Cell], baselines: Sequence[Cell] = ()) -> Served:
    """Ask a server what it is, and for every cell with a tiny prompt.

    Args:
        client: its model is not looked at.
        baselines: cells to stand beside; a method of theirs that it refuses is left out.

    Raises:
        Unreachable: it does not answer, or not as vLLM does.
        ConfigError: it compresses nothing, or refuses a cell; with its own reason.
    """
    host = client.host
    status, _ = host.get("/health", _QUICK_S)
    if 400 <= status < 500:
        raise Unreachable(
            f"{host.url}/health answered {status}; give the address of vLLM itself, and not that of"
            " a gateway before it"
        )
    if status != 200:
        raise Unreachable(f"{host.url}/health answered {status}; wait until the server is well")
    client = dataclasses.replace(client, model=_model(host))
    metrics = counted(host)
    client, notes = _telling(client)
    _require_plugin(client, metrics)
    for cell in cells:
        _require(client, cell)
    taken, left_out = _allowed(client, baselines)
    notes += left_out
    info = metrics.info if metrics else None
    client = dataclasses.replace(client, by_role=_tells_roles(client))
    if not client.ask(_TINY, FULL).names:
        notes.append(
            "The server does not tell every token of an answer, so answers are compared by"
            " characters, and there is no KL."
        )
    return Served(
        client=client,
        settings={name: info[name] for name in _DECISIVE if info and name in info},
        baselines=taken,
        notes=notes,
    )


def counted(host: Host) -> Metrics | None:
    """The server's metrics; None where it shows none."""
    try:
        return host.metrics(_QUICK_S)
    except Unreachable:
        return None


def _model(host: Host) -> str:
    status, text = host.get("/v1/models", _QUICK_S)
    if status != 200:
        hint = ""
        if status in (401, 403):
            hint = "; --api-key is not the server's" if host.key else "; pass --api-key"
        raise Unreachable(f"{host.url}/v1/models answered {status}: {error_message(text)}{hint}")
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise Unreachable(f"{host.url}/v1/models lists no model; is it a vLLM server?") from None


def _telling(client: Client) -> tuple[Client, list[str]]:
    """The client with as many likely tokens as the server gives, and what to say of it."""
    for top in _TOPS:
        asking = dataclasses.replace(client, top=top)
        try:
            asking.ask(_TINY, FULL)
        except Refused as e:
            if e.status != 400 or "logprobs" not in e.reason or top == _TOPS[-1]:
                raise _refused(FULL, e) from None
            continue
        if top == _TOPS[0]:
            return asking, []
        return asking, [
            f"The server gives {top} likely tokens in each place and not {_TOPS[0]}"
            " (--max-logprobs): KL is a weaker bound."
        ]
    raise AssertionError("the last try returns or raises")


def _tells_roles(client: Client) -> bool:
    """Whether a request may ask what is kept of each role: not without --kv-usage."""
    try:
        dataclasses.replace(client, by_role=True).ask(_TINY, FULL)
    except Refused as e:
        if e.status != 400 or BY_ROLE not in e.reason:
            raise
        return False
    return True


def _require_plugin(client: Client, metrics: Metrics | None) -> None:
    """vLLM alone takes any ``vllm_xargs`` and answers in full: everything would agree."""
    if metrics is not None and metrics.info is not None:
        return
    try:
        client.ask(_TINY, _NO_SUCH)
    except Refused as e:
        if e.status == 400:
            return
        raise
    raise ConfigError(
        f"{client.host.url} must compress what asks for it, and takes any method without a word:"
        " the plugin is off there; start it with --kv-compress off --kv-allow-override all"
    )


def _require(client: Client, cell: Cell) -> None:
    try:
        client.ask(_TINY, cell)
    except Refused as e:
        raise _refused(cell, e) from None


def _allowed(client: Client, baselines: Sequence[Cell]) -> tuple[list[Cell], list[str]]:
    """Those that the server takes, by whole methods, and a sentence about the others."""
    reasons: dict[str, str] = {}
    for cell in baselines:
        if cell.method in reasons:
            continue
        try:
            client.ask(_TINY, cell)
        except Refused as e:
            if e.status != 400:
                raise
            reasons[cell.method] = e.reason
    taken = [cell for cell in baselines if cell.method not in reasons]
    if not reasons:
        return taken, []
    return taken, [
        "What a method has to beat is not all there, since the server refuses"
        f" {' and '.join(reasons)} ({next(iter(reasons.values()))})."
    ]


def _refused(cell: Cell, e: Refused) -> Exception:
    if e.status != 400:
        return e
    cure = ""
    if "kv_budget must be" in e.reason:
        cure = "; start it with other --kv-budget-bounds, or leave this budget out"
    elif "chat template" in e.reason:
        cure = " Every prompt is sent as a chat: start it with --chat-template"
    elif "pulls prompts" in e.reason:
        cure = "; leave this out"
    elif "kv_" in e.reason:
        cure = "; start it with --kv-allow-override all or a list that has it, or leave this out"
    return ConfigError(f"the server refuses {cell}: {e.reason}{cure}")
