"""Request bodies with a setting in the wrong place or under a wrong name."""

MISPLACED = [
    ({"kv_budget": 0.05}, "'kv_budget' (0.05) must be inside {place}"),
    ({"kv-budget": 0.05}, "'kv-budget' is not a field of the request; did you mean 'kv_budget'"),
    ({"kvBudget": 0.05}, "'kvBudget' is not a field of the request; did you mean 'kv_budget'"),
    ({"kv_bugdet": 0.05}, "did you mean 'kv_budget' inside {place}?"),
    ({"kv_compress": "off"}, "'kv_compress' ('off') must be inside {place}"),
    ({"kv_protect": "system"}, "'kv_protect' ('system') must be inside {place}"),
    ({"kv_nonsense": 1}, "'kv_nonsense' is not a field of the request; inside {place} a request"),
    ({"kv_transfer_param": {}}, "did you mean 'kv_transfer_params'?"),
    ({"extra_body": {"vllm_xargs": {"kv_budget": 0.05}}}, "send its keys at the top level"),
    ({"extra_body": {"kv_budget": 0.05}}, "send its keys at the top level"),
    ({"extra_body": {"kv-bugdet": 0.05}}, "send its keys at the top level"),
    ({"extra_body": {"top_k": 1}}, "send its keys at the top level"),
    ({"vllm_xarg": {"kv_budget": 0.05}}, "'vllm_xarg' is not a field of the request; did you mean"),
    ({"vllm-xargs": {"kv_bugdet": 0.05}}, "did you mean {place}?"),
    ({"VLLM_XARGS": {"budget": 0.05}}, "did you mean {place}?"),
    ({"xargs": {"kv_compress": "off"}}, "did you mean {place}?"),
    ({"extra_args": {"kv_compress": "off"}}, "did you mean {place}?"),
]
"""Keys to add to a request's body, each with the error message."""

MISSPELT = [
    ({"kv-budget": 0.3}, "'kv-budget' is unknown; did you mean 'kv_budget'?"),
    ({"KV_BUDGET": 0.3}, "'KV_BUDGET' is unknown; did you mean 'kv_budget'?"),
    ({"budget": 0.3}, "'budget' is unknown; did you mean 'kv_budget'?"),
    ({"kvbudget": 0.3}, "'kvbudget' is unknown; did you mean 'kv_budget'?"),
    ({"kv_budgte": 0.3}, "'kv_budgte' is unknown; did you mean 'kv_budget'?"),
]
"""Misspelt extra arguments, each with the error message."""

UNRELATED = [
    {"kv_transfer_params": None},
    {"budget": 5},
    {"nvext": {"kv_overlap": 1, "annotations": ["kv_budget"]}},
    {"metadata": {"user": "kv_budget"}},
]
"""Keys that other software uses: vLLM ignores them or has a field of that name."""


def minimal_requests():
    """Return a short request body for each path that generates."""
    turn = [{"role": "user", "content": "Hello"}]
    common = {"model": "demo", "max_tokens": 2}
    return {
        "/v1/chat/completions": common | {"messages": turn},
        "/v1/completions": common | {"prompt": "Hello"},
        "/v1/responses": {"model": "demo", "input": "Hello", "max_output_tokens": 16},
        "/v1/messages": common | {"messages": turn},
        "/v1/chat/completions/batch": common | {"messages": [turn]},
        "/inference/v1/generate": {
            "model": "demo", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2},
        },
    }  # fmt: skip
