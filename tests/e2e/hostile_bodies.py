"""Random request bodies that are wide, deep, long or full of control characters."""

import json
import random

from misplaced_settings import minimal_requests
from vllm_kvcompress.settings.request_keys import REQUEST_KEYS

PLACES = ("extra arguments", "in extra arguments", "top level", "in an object", "request_id")
# Not kv_transfer_params: vLLM alone answers 500 if that is a list in the extra arguments.
KEYS = (*REQUEST_KEYS, "kv_budgett", "kvcompress_options")
OBJECTS = ("zz", "vllm_xarg", "extra_body", "kv_transfer_params", "sampling_params")
MAX_ID = 3000
"""Characters of a request's id, which vLLM repeats in its response."""


def wide(prefix, count=20_000):
    """Return an object with many keys of the same length."""
    return {f"{prefix}tdegbudceod{i:05}": 1 for i in range(count)}


def hostile_value(rng):
    """Return a JSON value of up to a megabyte."""
    text = rng.choice(["A", "9", "system,", "0:1,", "\x1b[2J\n", "\r\u202e\x00", "\ud800"])
    value = rng.choice(
        [
            text * rng.randrange(1, 100),
            text * (500_000 // len(text)),
            [text] * rng.randrange(1, 50_000),
            wide(rng.choice(["kv", "kv_", text])),
            10**400,
            float("nan"),
            float("inf"),
        ]
    )
    for _ in range(rng.choice([0, 0, 0, 1, 3, 200])):
        value = rng.choice([{rng.choice(["a", "kv_b", *KEYS]): value}, [value]])
    return value


def hostile_body(rng, path):
    """Return a body for an endpoint, as JSON: a valid request with one hostile place."""
    body = minimal_requests().get(path.removesuffix("/render"), {"model": "demo", "prompt": "x"})
    body["model"] = rng.choice(["demo", "demo@off"])
    value, place = hostile_value(rng), rng.choice(PLACES)
    key = rng.choice(KEYS)
    if place == "top level":
        body[key] = value
    elif place == "in an object":
        body[rng.choice(OBJECTS)] = {key: value}
    elif place == "request_id":
        body[place] = str(value if isinstance(value, str) else [*"\x1b[2J\n", key])[:MAX_ID]
    else:
        extra_args = {key: value} if place == "in extra arguments" else value
        body["vllm_xargs"] = extra_args
        if "sampling_params" in body:
            body["sampling_params"] = body["sampling_params"] | {"extra_args": extra_args}
    return json.dumps(body)


def hostile_bodies(path, count):
    """Return the same random bodies in every run."""
    rng = random.Random(path)
    return [hostile_body(rng, path) for _ in range(count)]
