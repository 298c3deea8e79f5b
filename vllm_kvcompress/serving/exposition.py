"""Send HTTP requests to a server and parse its ``/metrics`` page.

Uses only the standard library, so that short commands start fast.
"""

import json
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException, IncompleteRead
from typing import Any

from vllm_kvcompress.errors import ConfigError, KVCompressError

PREFIX = "vllm:kv_compress_"
_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:\\.|[^"\\])*)"')
_MAX_BYTES = 64 << 20
"""Longest response that is read. A million token ids take a tenth of it."""
_MAX_BYTES_PER_TOKEN = 16 << 10
"""A stream may be longer by this for each requested token. 20 log-probabilities take 3 KiB."""
_MAX_NAME = 1000
"""Longest model name, in characters."""
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def _direct_opener() -> urllib.request.OpenerDirector:
    """Return an opener that follows no redirect and ignores ``http_proxy``."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
    ):
        opener.add_handler(handler)
    return opener


_DIRECT = _direct_opener()


class Unreachable(KVCompressError, OSError):
    """The server sent no usable response."""


class Refused(Unreachable):
    """The server responded with an error status.

    Args:
        path: path of the request.
        status: HTTP status of the response.
        reason: error message of the response.
    """

    def __init__(self, path: str, status: int, reason: str) -> None:
        super().__init__(f"{path} answered {status}: {reason}")
        self.status, self.reason = status, reason


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample line of a metrics page."""

    name: str
    labels: dict[str, str]
    value: float


class Metrics:
    """The samples of a metrics page at one moment."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[Sample]] = {}
        for line in text.splitlines():
            if line.startswith("#") or (m := _SAMPLE.match(line)) is None:
                continue
            labels = {key: _plain(raw) for key, raw in _LABEL.findall(m["labels"] or "")}
            sample = Sample(m["name"], labels, float(m["value"]))
            self._samples.setdefault(sample.name, []).append(sample)

    def of(self, name: str) -> Sequence[Sample]:
        """Return all samples of a metric; empty if the server does not export it."""
        return self._samples.get(name, [])

    def total(self, name: str) -> float:
        """Return the sum of a metric's samples; 0 if there are none."""
        return sum(sample.value for sample in self.of(name))

    def by_engine(self, name: str) -> dict[str, float]:
        """Return the sum of a metric's samples for each value of the ``engine`` label."""
        totals: dict[str, float] = {}
        for sample in self.of(name):
            engine = sample.labels.get("engine", "")
            totals[engine] = totals.get(engine, 0.0) + sample.value
        return totals

    @property
    def info(self) -> dict[str, str] | None:
        """Return the server's compression settings, or None if compression is off."""
        samples = self.of(f"{PREFIX}info")
        return samples[0].labels if samples else None

    @property
    def turned_off(self) -> bool:
        """Return whether the server's settings turn compression off."""
        return bool(self.of(f"{PREFIX}off"))

    @property
    def how_to_turn_on(self) -> str:
        """Return the fix if compression is off."""
        if self.turned_off:
            return "restart it without KVCOMPRESS_OFF, and with a method in --kv-compress"
        return "start it with --kv-compress, and check in its log that the plugin was loaded"


def _names_a_host(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _plain(label: str) -> str:
    return _visible(re.sub(r"\\.", lambda m: _ESCAPES.get(m[0], m[0]), label))


def _visible(text: str) -> str:
    """Return `text` with ``?`` in place of each character that a terminal would not print."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def printable(text: str, limit: int = 2000) -> str:
    """Return a server's text as one printable line of at most `limit` characters.

    A terminal would obey the control characters of a text, and reorder a line by others.
    """
    # Cut twice: whitespace is removed in between, and a text may be megabytes long.
    line = _visible(" ".join(text[: 8 * limit].split()))
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


@dataclass(frozen=True, slots=True)
class Host:
    """The address of a running server.

    Args:
        url: address without a path, such as ``http://127.0.0.1:8000``.
        key: bearer token, or None if the server needs none.
        flag: option that gives `url`, for error messages.

    Raises:
        ConfigError: `url` has a path or no host, or `key` cannot go into an HTTP header.
    """

    url: str
    key: str | None = None
    flag: str = "--url"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^/\s?#]+/?", self.url) or not _names_a_host(self.url):
            raise ConfigError(
                f"{self.flag} must be a server's address without a path, such as"
                f" http://127.0.0.1:8000; got {self.url!r}"
            )
        if self.key is not None and not re.fullmatch(r"[\x21-\x7e]*", self.key):
            # The message must not reveal the key.
            raise ConfigError(
                "--api-key must be ASCII without spaces, since it goes into an HTTP header; it has"
                " a space, the end of a line or another sign, often the last one of its file:"
                " take it out"
            )

    def get(self, path: str, timeout_s: float) -> tuple[int, str]:
        """Return the status and text of a page.

        Raises:
            Unreachable: the server did not respond.
        """
        with self._open(path, None, timeout_s) as answer:
            return answer.status, self._read(answer)

    def metrics(self, timeout_s: float) -> Metrics:
        """Return the server's current metrics.

        Raises:
            Unreachable: the server has no ``/metrics`` page, or did not respond.
        """
        status, text = self.get("/metrics", timeout_s)
        if status != 200:
            raise Unreachable(
                f"{self.url}/metrics answered {status}; start the server without"
                " --disable-log-stats, and give its own address"
            )
        return Metrics(text)

    def first_model(self, timeout_s: float) -> Mapping[str, Any]:
        """Return the first model in ``/v1/models``: its ``id``, and what else the server says.

        Raises:
            Unreachable: the server did not respond, or lists no model with a printable name.
        """
        status, text = self.get("/v1/models", timeout_s)
        if status != 200:
            hint = ""
            if status in (401, 403):
                hint = "; --api-key is not the server's key" if self.key else "; pass --api-key"
            raise Unreachable(
                f"{self.url}/v1/models answered {status}: {error_message(text)}{hint}"
            )
        try:
            first: dict[str, Any] = json.loads(text)["data"][0]
            name = str(first["id"])
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise Unreachable(
                f"{self.url}/v1/models lists no model; is it a vLLM server?"
            ) from None
        if not name.isprintable() or len(name) > _MAX_NAME:
            raise Unreachable(
                f"{self.url}/v1/models must list a model name of at most {_MAX_NAME:,} printable"
                f" characters, got {printable(name, 60)!r}; start the server with another"
                " --served-model-name"
            )
        return first

    def post(self, path: str, body: Any, timeout_s: float) -> tuple[int, str]:
        """Send a JSON body, and return the status and text of the response.

        Raises:
            Unreachable: the server did not respond.
        """
        with self._open(path, body, timeout_s) as answer:
            return answer.status, self._read(answer)

    def stream(self, path: str, body: Any, timeout_s: float) -> Iterator[dict[str, Any]]:
        """Send a JSON body, and yield each event of the streaming response as it arrives.

        Raises:
            Refused: the status is not 200.
            Unreachable: an event reports an error, or the stream ended early.
        """
        limit = _MAX_BYTES + _MAX_BYTES_PER_TOKEN * int(body.get("max_tokens") or 0)
        with self._open(path, body, timeout_s) as answer:
            if answer.status != 200:
                raise Refused(path, answer.status, error_message(self._read(answer)))
            for text in self._lines(answer, limit):
                if text == "[DONE]":
                    return
                if not text:
                    continue
                event: dict[str, Any] = json.loads(text)
                if "error" in event:
                    raise Unreachable(f"{path} failed: {error_message(text)}")
                yield event
        # If the server or a proxy dies, the connection can still close cleanly, without [DONE].
        raise self._cut_off()

    def _open(self, path: str, body: Any, timeout_s: float) -> Any:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        address = self.url.rstrip("/") + path
        request = urllib.request.Request(address, data=data, headers=headers)
        try:
            return _DIRECT.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as e:
            target = e.headers.get("Location")
            if target is not None and 300 <= e.code < 400:
                e.close()
                raise Refused(
                    path,
                    e.code,
                    f"it redirects to {printable(target, 120)!r}. Redirects are not followed,"
                    f" because the API key must not go to another server: set {self.flag} to the"
                    " final address, if you trust it",
                ) from None
            # An error response still has a status and a text.
            return e
        except (OSError, HTTPException, UnicodeError) as e:
            reason = getattr(e, "reason", e)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise Unreachable(
                    f"{address} has a certificate that is not trusted here"
                    f" ({reason.verify_message}); name the file of its authority in SSL_CERT_FILE,"
                    f" or correct {self.flag}"
                ) from None
            raise Unreachable(
                f"{address} does not answer ({printable(str(reason), 300)}); start the server, or"
                f" correct {self.flag}"
            ) from None

    def _lines(self, answer: Any, limit: int) -> Iterator[str]:
        received = 0
        while line := self._received(answer.readline, limit, received):
            received += len(line)
            if not line.endswith((b"\n", b"[DONE]")):
                return  # cut off
            yield line.decode(errors="replace").strip().removeprefix("data:").strip()

    def _read(self, answer: Any) -> str:
        data = self._received(answer.read, _MAX_BYTES)
        if (
            answer.length
        ):  # bytes of Content-Length that did not arrive; a bounded read ignores them
            raise self._cut_off(IncompleteRead(data, answer.length))
        return data.decode(errors="replace")

    def _received(self, read: Callable[[int], bytes], limit: int, received: int = 0) -> bytes:
        """Return what `read` returns.

        Raises:
            Unreachable: the connection ended, or the response is longer than `limit` bytes, of
                which `received` were read before.
        """
        try:
            data = read(limit - received + 1)
        except (OSError, HTTPException) as e:
            raise self._cut_off(e) from None
        if received + len(data) > limit:
            raise Unreachable(
                f"{self.url} sent more than {limit >> 20:,} MiB, the most that this request may"
                " get; is it a vLLM server?"
            )
        return data

    def _cut_off(self, reason: Exception | None = None) -> Unreachable:
        why = "" if reason is None else f" ({printable(str(reason), 300)})"
        return Unreachable(
            f"{self.url} closed the connection before its response was complete{why}"
        )


def error_message(text: str) -> str:
    """Return a JSON error's message, or the start of any other text, as one printable line."""
    try:
        return printable(str(json.loads(text)["error"]["message"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return printable(text.strip()[:300])
