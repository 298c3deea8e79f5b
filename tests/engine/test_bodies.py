"""Ignored keys of request bodies, with and without the HTTP request."""

import asyncio
import json

import pytest

from vllm_kvcompress.engine.frontend.api import ignored_keys


def http(body):
    from starlette.requests import Request

    async def receive():
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def sent_of(request, raw_request):
    return [
        ({key for key in sent if key not in fields}, place)
        for sent, fields, place in asyncio.run(ignored_keys(request, raw_request))
    ]


@pytest.mark.parametrize("from_a_file", [False, True])
def test_unknown_keys_are_found_with_and_without_an_http_request(from_a_file):
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    body = {"model": "m", "prompt": "x", "kv_budget": 0.1, "vllm_xargs": {"kv_budget": 0.2}}
    request = CompletionRequest(**body)
    found = sent_of(request, None if from_a_file else http(body))
    assert found == [({"kv_budget"}, "vllm_xargs")]


def test_a_token_request_has_two_objects_to_search():
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    params = {"max_tokens": 2, "kv_budget": 0.1, "extra_args": {"kv_budget": 0.2}}
    body = {"token_ids": [1], "vllm_xargs": {"kv_budget": 0.1}, "sampling_params": params}
    place = "sampling_params.extra_args"
    request = GenerateRequest(**body)
    assert sent_of(request, http(body)) == [({"vllm_xargs"}, place), ({"kv_budget"}, place)]
    assert sent_of(request, http([1])) == []
