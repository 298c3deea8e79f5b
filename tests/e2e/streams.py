"""Stream completions of a server's model `demo`, and report how they end."""

import json
from contextlib import contextmanager

import httpx


def completion_body(text, tokens, **fields):
    common = {"model": "demo", "prompt": text, "max_tokens": tokens, "temperature": 0}
    return common | {"ignore_eos": True} | fields


@contextmanager
def streaming(server, text, tokens, **fields):
    """Yield an iterator over the events of one streamed completion."""
    request = completion_body(text, tokens, stream=True, **fields)
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=request, timeout=600
    ) as response:

        def events():
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

        yield events()


def stream_end(server, text, tokens, **fields):
    """Return how a stream ended: its finish reason, or the error that broke it."""
    try:
        with streaming(server, text, tokens, **fields) as events:
            reason = None
            for event in events:
                if "error" in event:
                    return "error"
                reason = event["choices"][0]["finish_reason"] or reason
            return reason or "cut off"
    except httpx.HTTPError as e:
        return type(e).__name__
