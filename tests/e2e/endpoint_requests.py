"""Send the same prompt to each endpoint, and read the compression report in the response."""

import json

import httpx

ENDPOINTS = ["chat/completions", "completions", "responses"]


def body(endpoint, text, xargs, stream, model="demo"):
    common = {"model": model, "temperature": 0, "stream": stream, "vllm_xargs": xargs}
    if stream and endpoint != "responses":
        common["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if endpoint == "chat/completions":
        messages = [{"role": "user", "content": text}]
        return common | {"messages": messages, "max_tokens": 4, "ignore_eos": True}
    if endpoint == "completions":
        return common | {"prompt": text, "max_tokens": 4, "ignore_eos": True}
    return common | {"input": text, "max_output_tokens": 16}


def post(server, endpoint, text, xargs, stream=False, model="demo"):
    request = body(endpoint, text, xargs, stream, model)
    return httpx.post(f"{server.url}/v1/{endpoint}", json=request, timeout=300)


def usage_events(response):
    """Return the response body, or the streamed events that have a ``usage`` field."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [response.json()]
    events = [x[6:] for x in response.text.splitlines() if x.startswith("data: ")]
    parsed = [json.loads(event) for event in events if event != "[DONE]"]
    events_or_responses = [event.get("response", event) for event in parsed]
    return [event for event in events_or_responses if event.get("usage")]


def compression_report(response):
    """Return the ``kv_compress`` object of a response's usage, or None if there is none."""
    usage = response["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return details.get("kv_compress")


RULE = "Never say the word orange, and answer in one line."
QUESTION = "In one line: what is the text above about?"


def chat_body(endpoint, text):
    """Return the request body of the same chat with a system prompt, in the endpoint's format."""
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "Read."}]
    turns.append({"role": "user", "content": QUESTION})
    common = {"model": "demo", "temperature": 0}
    if endpoint == "messages":
        return common | {"system": RULE, "messages": turns, "max_tokens": 4}
    if endpoint == "responses":
        return common | {"instructions": RULE, "input": turns, "max_output_tokens": 16}
    system = {"role": "system", "content": [{"type": "text", "text": RULE}]}
    return common | {"messages": [system, *turns], "max_tokens": 4, "ignore_eos": True}
