"""The same question on each endpoint, by hand, and what its answer says of its compression."""

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
    sent = body(endpoint, text, xargs, stream, model)
    return httpx.post(f"{server.url}/v1/{endpoint}", json=sent, timeout=300)


def answers(response):
    """The answer as JSON, or the chunks of a streamed one that say what was used."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [response.json()]
    events = [x[6:] for x in response.text.splitlines() if x.startswith("data: ")]
    parsed = [json.loads(event) for event in events if event != "[DONE]"]
    found = [event.get("response", event) for event in parsed]
    return [event for event in found if event.get("usage")]


def said(answer):
    """What an answer says of its compression; None when it says nothing."""
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return details.get("kv_compress")


RULE = "Never say the word orange, and answer in one line."
QUESTION = "In one line: what is the text above about?"


def chat_of(endpoint, text):
    """The same chat with a system prompt, as each endpoint takes it: path and body."""
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "Read."}]
    turns.append({"role": "user", "content": QUESTION})
    common = {"model": "demo", "temperature": 0}
    if endpoint == "messages":
        return common | {"system": RULE, "messages": turns, "max_tokens": 4}
    if endpoint == "responses":
        return common | {"instructions": RULE, "input": turns, "max_output_tokens": 16}
    system = {"role": "system", "content": [{"type": "text", "text": RULE}]}
    return common | {"messages": [system, *turns], "max_tokens": 4, "ignore_eos": True}
