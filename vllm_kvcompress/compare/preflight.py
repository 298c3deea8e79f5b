"""Checks of the servers before a comparison sends them any prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_kvcompress.compare.client import FULL, Cell, Client
from vllm_kvcompress.compare.tasks import Item
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.planning.cache_dtypes import share_of_bytes
from vllm_kvcompress.serving.exposition import Host, Metrics, Refused, Unreachable, printable
from vllm_kvcompress.settings.request_keys import PACKED_DTYPE

_PAGE_TIMEOUT_S = 10.0
_MAX_NAME = 60
"""Most characters of a setting that the report quotes from a server."""
_TOP_LOGPROBS = (20, 5, 1, 0)
_TINY = Item(
    name="preflight",
    task="preflight",
    messages=({"role": "user", "content": "Count to nine."},),
    answers=(),
    max_tokens=4,
)
_OUTPUT_SETTINGS = ("method", "window", "min_prompt", "min_output", "pressure", "packed_dtype")
"""Server settings that change outputs and that no request, or not every request, overrides."""
_UNKNOWN_METHOD = Cell(method="no-such-method")
_FIXES = {
    "kv_budget must be": (
        "; start the server with other --kv-budget-bounds, or remove this budget"
    ),
    PACKED_DTYPE: "; remove this format from --budgets",
    "chat template": " Every prompt is sent as a chat: start the server with --chat-template",
    "pulls prompts": "; remove this method",
    "kv_": (
        "; start the server with --kv-allow-override all or a list that includes this method, or"
        " remove it"
    ),
}
"""What to do about a refused cell, by the first of these parts that the server's reason has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """The servers of a comparison, which passed the checks.

    Args:
        clients: by `Cell.server`: clients with the model and the options that the server supports.
        settings: settings of the compared server that change outputs. Empty if it does not report
            them.
        cells: the methods to compare, with their budgets.
        baselines: cells to show next to `cells`: the requested baselines that the server accepts,
            and the uncompressed caches of the other servers.
        notes: sentences that the report must include.
    """

    clients: Mapping[str, Client]
    settings: Mapping[str, str]
    cells: Sequence[Cell]
    baselines: Sequence[Cell]
    notes: Sequence[str]

    @property
    def client(self) -> Client:
        """Return the client of the compared server."""
        return self.clients[FULL.server]


def check_servers(
    client: Client, cells: Sequence[Cell], baselines: Sequence[Cell], others: Mapping[str, Host]
) -> Servers:
    """Check the servers by sending a tiny prompt in every cell.

    Args:
        client: client of the compared server. Its `model` is ignored and replaced by the served
            model.
        cells: cells that the server must accept.
        baselines: further cells. A baseline method that the server refuses is left out.
        others: other servers of the same model by `Cell.server`. Their uncompressed outputs are
            compared.

    Raises:
        Unreachable: A server does not respond, or does not respond as vLLM does.
        ConfigError: The server does not compress, or refuses a cell; the message quotes the
            server's reason. Or another server serves another model.
    """
    host = client.host
    status, _ = host.get("/health", _PAGE_TIMEOUT_S)
    if 400 <= status < 500:
        raise Unreachable(
            f"{host.url}/health returned {status}; give the address of vLLM itself, not of a"
            " gateway in front of it"
        )
    if status != 200:
        raise Unreachable(f"{host.url}/health returned {status}; wait until the server is healthy")
    client = replace(client, model=str(host.first_model(_PAGE_TIMEOUT_S)["id"]))
    metrics = read_metrics(host)
    client, notes = _with_top_logprobs(client)
    _require_plugin(client, metrics)
    for cell in cells:
        try:
            client.complete(_TINY, cell)
        except Refused as e:
            raise _refusal_error(cell, e) from None
    refused = _refused_methods(client, baselines)
    accepted = [cell for cell in baselines if cell.method not in refused]
    if refused:
        notes.append(
            "Some baselines are missing because the server refuses"
            f" {' and '.join(refused)} ({next(iter(refused.values()))})."
        )
    info = (metrics.info if metrics else None) or {}
    settings = {name: printable(info[name], _MAX_NAME) for name in _OUTPUT_SETTINGS if name in info}
    packed_dtype = settings.get("packed_dtype")
    if packed_dtype and not all(cell.packed_dtype for cell in cells):
        notes.append(f"The server packs kept tokens in its default format {packed_dtype}.")
    client = replace(client, dtype_bytes=share_of_bytes(_cache_dtype(metrics) or "auto"))
    if not client.complete(_TINY, FULL).tokens:
        notes.append(
            "The server does not report every output token, so outputs are compared by characters"
            " and there is no KL."
        )
    clients = {FULL.server: client}
    for server, other in others.items():
        cell, clients[server], other_notes = _check_other(other, client, server)
        if any(cell.method == each.method for each in accepted):
            cell = replace(cell, method=f"{cell.method} at {server}")
        accepted.append(cell)
        notes += other_notes
    return Servers(clients=clients, settings=settings, cells=cells, baselines=accepted, notes=notes)


def _check_other(host: Host, compared: Client, server: str) -> tuple[Cell, Client, list[str]]:
    """Return the cell, the client and notes of another server."""
    model = str(host.first_model(_PAGE_TIMEOUT_S)["id"])
    if model != compared.model:
        raise ConfigError(
            f"--against {host.url} must serve {compared.model}, as {compared.host.url} does, got"
            f" {model}; start it with the same model, or with --served-model-name {compared.model}"
        )
    cache_dtype = _cache_dtype(read_metrics(host))
    client, notes = _with_top_logprobs(
        replace(
            compared,
            host=host,
            dtype_bytes=None if cache_dtype is None else share_of_bytes(cache_dtype),
        )
    )
    name = "other server" if cache_dtype is None else f"{cache_dtype} alone"
    return Cell(method=name, budget=1.0, server=server), client, notes


def _cache_dtype(metrics: Metrics | None) -> str | None:
    """Return the server's ``--kv-cache-dtype``, or None if it has no metrics page."""
    samples = metrics.of("vllm:cache_config_info") if metrics else ()
    cache_dtype = samples[0].labels.get("cache_dtype") if samples else None
    return None if cache_dtype is None else printable(cache_dtype, _MAX_NAME)


def read_metrics(host: Host) -> Metrics | None:
    """Return the server's metrics, or None if it has no metrics page."""
    try:
        return host.metrics(_PAGE_TIMEOUT_S)
    except Unreachable:
        return None


def _with_top_logprobs(client: Client) -> tuple[Client, list[str]]:
    """Return a client with the most top log-probabilities that the server allows, and notes."""
    for top_logprobs in _TOP_LOGPROBS:
        candidate = replace(client, top_logprobs=top_logprobs)
        try:
            candidate.complete(_TINY, FULL)
        except Refused as e:
            is_last = top_logprobs == _TOP_LOGPROBS[-1]
            if e.status != 400 or "logprobs" not in e.reason or is_last:
                raise _refusal_error(FULL, e) from None
            continue
        if top_logprobs == _TOP_LOGPROBS[0]:
            return candidate, []
        return candidate, [
            f"The server allows {top_logprobs} top log-probabilities per position instead of"
            f" {_TOP_LOGPROBS[0]} (--max-logprobs): KL is a weaker lower bound."
        ]
    raise AssertionError("the last attempt returns or raises")


def _require_plugin(client: Client, metrics: Metrics | None) -> None:
    """Raise ConfigError if the plugin is off.

    Plain vLLM accepts any ``vllm_xargs`` and does not compress: every output would match.
    """
    if metrics is not None and metrics.info is not None:
        return
    if not _refused_methods(client, [_UNKNOWN_METHOD]):
        raise ConfigError(
            f"{client.host.url} accepts an unknown compression method, so the plugin is off there;"
            " start the server with --kv-compress off --kv-allow-override all"
        )


def _refused_methods(client: Client, cells: Sequence[Cell]) -> dict[str, str]:
    """Return the server's reasons by method. A refused method is not tried in further cells."""
    reasons: dict[str, str] = {}
    for cell in cells:
        if cell.method in reasons:
            continue
        try:
            client.complete(_TINY, cell)
        except Refused as e:
            if e.status != 400:
                raise
            reasons[cell.method] = e.reason
    return reasons


def _refusal_error(cell: Cell, e: Refused) -> Exception:
    if e.status != 400:
        return e
    fix = next((fix for part, fix in _FIXES.items() if part in e.reason), "")
    return ConfigError(f"the server refuses {cell}: {e.reason}{fix}")
