"""Generate invalid and unusual extra arguments, and predict whether the server refuses them."""

from hypothesis import strategies as st

from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.request_options import RequestOptions

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
KEYS = st.sampled_from(["kv_compress", "kv_budget", "kv_decode_budget", "kv_budgett", "x"])
EXTRA_ARGS = st.dictionaries(KEYS, JSON, min_size=1, max_size=3) | st.fixed_dictionaries(
    {},
    optional={
        "kv_compress": st.sampled_from(["off", "cake", "snapkv", "h2o", "custom", "CAKE", ""]),
        "kv_budget": st.floats(0, 1.2) | st.integers(-1, 2000) | st.sampled_from(["0.2", "1024"]),
        "kv_decode_budget": st.integers(-1, 600) | st.sampled_from([256.0, 256.5, "256"]),
    },
)


def must_be_refused(xargs):
    """Return True if the server of test_overrides must refuse these extra arguments."""
    policy = {"allow_override": "off,snapkv,cake", "budget_bounds": "0.1:0.5,128:1024"}
    policy |= {"compress": "cake", "decode_budget": 512}
    try:
        RequestOptions.parse(CompressionConfig.parse(policy), xargs)
    except OverrideError:
        return True
    # vLLM itself refuses integers of extra arguments outside this range
    return any(type(x) is int and not -(2**63) <= x < 2**64 for x in xargs.values())


DECODE_BUDGETS = [
    (1024, "kv_decode_budget must be at most 512 on this server, got 1024"),
    (True, "kv_decode_budget must be a whole number of at least 2 tokens per layer, got 1"),
    ("256", "must be a whole number of at least 2 tokens per layer, got '256'"),
    (
        4,
        "decode_budget=4 tokens per layer cannot hold the decode window of 8 tokens and one more",
    ),
]
"""Decode budgets that the server refuses, each with the error message."""
