"""Streamed completions of a real server's model `demo`, and how they end."""

import json
from contextlib import contextmanager

import httpx


def asking(text, tokens, **more):
    common = {"model": "demo", "prompt": text, "max_tokens": tokens, "temperature": 0}
    return common | {"ignore_eos": True} | more


@contextmanager
def streaming(server, text, tokens, **more):
    """Events of one streamed completion, as they come."""
    sent = asking(text, tokens, stream=True, **more)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=sent, timeout=600) as answer:

        def events():
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

        yield events()


def listen(server, text, tokens, **more):
    """How one stream ended: its finish reason, or what broke it."""
    try:
        with streaming(server, text, tokens, **more) as events:
            reason = None
            for event in events:
                if "error" in event:
                    return "error"
                reason = event["choices"][0]["finish_reason"] or reason
            return reason or "cut off"
    except httpx.HTTPError as e:
        return type(e).__name__
