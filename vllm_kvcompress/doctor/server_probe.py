"""Checks that a running server compresses, with one request and the server's metrics."""

import json
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from vllm_kvcompress.doctor.checks import Check, CheckCallback, Report
from vllm_kvcompress.doctor.probe_prompt import Limits
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.planning.request import PlannedRequest
from vllm_kvcompress.serving.exposition import (
    PREFIX,
    Host,
    Metrics,
    Unreachable,
    error_message,
    printable,
)
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.packed_dtype import AUTO, K4V3

# vLLM updates its metrics in the next step; wait at most this long for it.
_SETTLE_TIMEOUT_S = 15.0
_HTTP_TIMEOUT_S = 10.0
_SHOWN_SETTINGS = (
    "method",
    "budget",
    "packed_dtype",
    "window",
    "lookahead",
    "min_prompt",
    "pressure",
    "allow_override",
    "alias",
)


def examine(
    host: Host,
    *,
    on_check: CheckCallback,
    text: str,
    xargs: Mapping[str, Any],
    expect: bool | None,
    tokens: int | None,
    timeout_s: float,
) -> Report:
    """Check over HTTP that a server compresses.

    Args:
        host: the server.
        on_check: called with each check as soon as it is made.
        text: text that the prompt is cut from.
        xargs: ``vllm_xargs`` of the request, which may select a method and a budget.
        expect: whether compression must be on; None to accept both.
        tokens: length of the prompt; None for the shortest that is compressed.
        timeout_s: time limit of the request in seconds.
    """
    checks: list[Check] = []

    def note(name: str, ok: bool, detail: str) -> bool:
        # Details quote the server's texts.
        checks.append(Check(name=name, ok=ok, detail=printable(detail)))
        on_check(checks[-1])
        return ok

    try:
        status, _ = host.get("/health", _HTTP_TIMEOUT_S)
        first = host.first_model(_HTTP_TIMEOUT_S)
        model, max_model_len = str(first["id"]), int(first.get("max_model_len") or 1 << 30)
        if not note(
            "server", status == 200, f"{host.url} serves {model}, /health answered {status}"
        ):
            return Report(checks=checks)
        before = host.metrics(_HTTP_TIMEOUT_S)
        if not _is_on(before, note, expect) or expect is False:
            return Report(checks=checks)
        model, request_settings = _model_and_settings(before.info or {}, model, xargs)
        limits = _limits(before, request_settings, max_model_len)
        prompt = _prompt(host, model, text, limits, tokens)
        request = limits.request(len(prompt))
        plan = request.plan
        if plan is None:
            raise ConfigError(
                f"this server does not compress a prompt of {len(prompt)} tokens; pass --tokens"
                f" {limits.shortest()}"
            )
        during = _generate(host, model, prompt, limits, xargs, timeout_s)
        after = _settled(host, before)
        note(*_counted(before, after, limits.settings.compress))
        note(*_freed(before, after, plan))
        note(*_gauge(before, during, after, plan, request, limits.draft_slots))
    except (Unreachable, ConfigError) as e:
        note("request" if checks else "server", False, str(e))
    return Report(checks=checks)


def _model_and_settings(
    info: Mapping[str, str], model: str, xargs: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any]]:
    """Return the model name to request, and the compression settings that it implies.

    A server may compress under an alias only, not under the model's own name.
    """
    if info.get("method") == "off" and not xargs:
        for name, meaning in json.loads(info.get("alias") or "{}").items():
            method, *kept = meaning.split(":")
            if kept:
                keys = ("kv_budget", "kv_packed_dtype")
                return name, {"kv_compress": method, **dict(zip(keys, kept, strict=False))}
    return model, xargs


def _is_on(metrics: Metrics, note: Callable[[str, bool, str], bool], expect: bool | None) -> bool:
    info = metrics.info
    if info is None:
        detail = "off: the server does not export vllm:kv_compress_info"
        if metrics.turned_off:
            detail = "off: its operator turned it off, and settings of requests are ignored"
        if expect:
            detail += f", expected on; {metrics.how_to_turn_on}"
        note("compression", not expect, detail)
        return False
    shown = ", ".join(f"{key} {info[key]}" for key in _SHOWN_SETTINGS if info.get(key))
    if expect is False:
        note("compression", False, f"on ({shown}), expected off")
        return False
    return note("compression", True, f"on: {shown}")


def _limits(metrics: Metrics, xargs: Mapping[str, Any], max_model_len: int) -> Limits:
    """Return the limits of a prompt, from the settings that the server exports.

    Args:
        metrics: the server's metrics.
        xargs: the request's own compression settings.
        max_model_len: maximum tokens of a prompt plus its output.

    Raises:
        Unreachable: the server does not export the needed metrics.
        ConfigError: the server only compresses requests that select a method.
    """
    info = dict(metrics.info or {})
    cache = metrics.of("vllm:cache_config_info")
    layers = {sample.labels.get("layer") for sample in metrics.of(f"{PREFIX}layer_tokens_total")}
    if not cache or not layers:
        raise Unreachable(
            "the server exports neither vllm:cache_config_info nor the kept tokens of each layer;"
            " is its plugin version different from this command's?"
        )
    gates: dict[str, Any] = {
        "min_prompt": int(info.get("min_prompt", 1024)),
        "min_output": int(info.get("min_output", 2)),
    }
    # Settings that keep all tokens export no look-ahead, but the request's budget may need one.
    keeps_all = info.get("packed_dtype") == K4V3 and info.get("budget") == "1.0"
    if info.get("lookahead") and not keeps_all:
        gates["lookahead"] = int(info["lookahead"])
    if info.get("packed_dtype"):
        gates["packed_dtype"] = info["packed_dtype"]
    settings: dict[str, Any] = {"compress": info.get("method", "off"), **gates}
    if settings["compress"] != "off":
        settings |= {"budget": info.get("budget", 0.2)}
        settings |= {"window": int(info["window"])} if info.get("window") else {}
    method = xargs.get("kv_compress")
    if settings["compress"] == "off" and method is None:
        raise ConfigError(
            "this server only compresses requests that select a method; pass --kv-compress METHOD,"
            f" one of {info.get('allow_override')}"
        )
    if method is not None and method != settings["compress"]:
        # Derive the method's settings the way the server does. A look-ahead that is the server
        # method's default does not carry over.
        if settings["compress"] != "off":
            default = CompressionConfig.parse({"compress": settings["compress"]})
            if gates.get("lookahead") == default.resolved_lookahead:
                del gates["lookahead"]
        server = CompressionConfig.parse({"compress": "off", "allow_override": "all", **gates})
        settings = server.variant(method).to_additional_config()
        settings |= {"budget": info["budget"]} if info.get("budget") else {}
    for key in ("budget", "lookahead", "packed_dtype"):
        if (value := xargs.get(f"kv_{key}")) is not None:
            settings[key] = value
    request_settings = CompressionConfig.parse(settings)
    page_tokens = None
    if request_settings.resolved_packed_dtype != AUTO:
        if not info.get("packed_page_tokens"):
            raise ConfigError(
                f"this server does not pack prompts in {request_settings.resolved_packed_dtype};"
                " start it with --kv-packed-dtype, or check without it"
            )
        page_tokens = int(info["packed_page_tokens"])
    return Limits(
        settings=request_settings,
        page_tokens=page_tokens,
        # Each pipeline stage divides a budget among its own layers.
        layers=len(layers) // int(info.get("stages", 1)),
        block_size=int(cache[0].labels["block_size"]),
        max_model_len=max_model_len,
        draft_layers=int(info.get("draft_layers", 0)),
        draft_slots=int(info.get("draft_slots", 0)),
    )


def _prompt(host: Host, model: str, text: str, limits: Limits, tokens: int | None) -> list[int]:
    """Return the token ids of a prompt with a random prefix, so no prefix cache contains it."""
    length = limits.shortest() if tokens is None else tokens
    prompt = f"{uuid.uuid4()}\n\n{text[: 12 * length]}"
    status, body = host.post("/tokenize", {"model": model, "prompt": prompt}, _HTTP_TIMEOUT_S)
    if status != 200:
        raise Unreachable(f"{host.url}/tokenize answered {status}: {error_message(body)}")
    ids: list[int] = json.loads(body)["tokens"]
    return (ids * (length // len(ids) + 1))[:length]


def _generate(
    host: Host,
    model: str,
    prompt: list[int],
    limits: Limits,
    xargs: Mapping[str, Any],
    timeout_s: float,
) -> list[tuple[int, Metrics]]:
    """Send the request and sample the server's metrics while it generates.

    Returns:
        Pairs of the minimum number of tokens computed by then, and the metrics.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 2 * limits.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    if xargs:
        body["vllm_xargs"] = dict(xargs)
    samples = []
    for count, _ in enumerate(host.stream("/v1/completions", body, timeout_s)):
        if count and count % (limits.output_tokens // 4) == 0:
            samples.append((len(prompt) + count, host.metrics(_HTTP_TIMEOUT_S)))
    return samples


def _settled(host: Host, before: Metrics) -> Metrics:
    """Return the metrics once they count the compressed prompt, or after `_SETTLE_TIMEOUT_S`.

    On an idle server it also waits until the KV cache usage is back at its old level.
    """
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while True:
        metrics = host.metrics(_HTTP_TIMEOUT_S)
        done = metrics.total(f"{PREFIX}requests_total") > before.total(f"{PREFIX}requests_total")
        idle = metrics.total("vllm:num_requests_running") == 0
        usage, usage_before = (m.total("vllm:kv_cache_usage_perc") for m in (metrics, before))
        if (done and (usage <= usage_before or not idle)) or time.monotonic() > deadline:
            return metrics
        time.sleep(0.2)


def _increase(name: str, before: Metrics, after: Metrics) -> float:
    """Return the increase of one of our counters."""
    return after.total(f"{PREFIX}{name}_total") - before.total(f"{PREFIX}{name}_total")


def _counted(before: Metrics, after: Metrics, method: str) -> tuple[str, bool, str]:
    """Check that the worker compressed the prompt."""
    planned, done = (_increase(name, before, after) for name in ("planned_requests", "requests"))
    if done >= 1:
        return "worker", True, f"{done:.0f} of {planned:.0f} planned prompts compressed ({method})"
    if planned >= 1:
        detail = (
            f"0 of {planned:.0f} planned prompts were compressed: compression is on but does not"
            " run; check the server's log, and look for another plugin that replaces vLLM's worker"
        )
        return "worker", False, detail
    reasons = {
        sample.labels.get("reason", ""): sample.value
        for sample in after.of(f"{PREFIX}skipped_requests_total")
    }
    for sample in before.of(f"{PREFIX}skipped_requests_total"):
        reasons[sample.labels.get("reason", "")] -= sample.value
    counted = [reason for reason, count in reasons.items() if count >= 1]
    detail = f"the prompt stayed uncompressed ({', '.join(counted) or 'no reason was counted'})"
    if counted == ["low_pressure"]:
        detail += ": the KV cache is emptier than --kv-pressure; run this while the server is busy"
    return "worker", False, detail


def _freed(before: Metrics, after: Metrics, plan: PagePlan) -> tuple[str, bool, str]:
    """Check that packing freed more blocks than it used."""
    freed, used = (_increase(name, before, after) for name in ("freed_blocks", "packed_blocks"))
    ok = freed > used
    detail = (
        f"{freed:.0f} full blocks were freed (this prompt has {plan.full_blocks}),"
        f" {used:.0f} were used for kept tokens"
    )
    return "blocks", ok, detail if ok else f"{detail}: no memory was saved"


def _gauge(
    before: Metrics,
    during: list[tuple[int, Metrics]],
    after: Metrics,
    plan: PagePlan,
    request: PlannedRequest,
    draft_slots: int,
) -> tuple[str, bool, str]:
    """Check vLLM's KV cache usage gauge, which is only comparable on an otherwise idle server."""
    name = "vllm:kv_cache_usage_perc"
    layers = [int(sample.labels["layer"]) for sample in after.of(f"{PREFIX}layer_tokens_total")]
    if max(layers, default=0) >= len(set(layers)):
        return "usage", True, "not checked: sliding-window layers hold blocks too"
    alone = all(metrics.total("vllm:num_requests_running") <= 1 for _, metrics in during)
    if not during or not alone or before.total(name) or len(after.of(name)) != 1:
        return "usage", True, "not checked: the server is serving other requests too"
    total = int(before.of("vllm:cache_config_info")[0].labels["num_gpu_blocks"]) - 1
    packed = [metrics for computed, metrics in during if computed > plan.tokens]
    blocks_in_use = [round(metrics.total(name) * total) for metrics in packed]
    last = plan.tokens + 2 * request.output
    planned = request.blocks_held(last) + request.added_blocks(last, draft_slots)
    uncompressed = -(-plan.tokens // plan.block_size)
    blocks_after = round(after.total(name) * total)
    ok = max(blocks_in_use) <= planned and blocks_after == 0
    detail = (
        f"{max(blocks_in_use)} blocks in use while decoding, at most {planned} planned"
        f" ({uncompressed} without compression), {blocks_after} afterwards"
    )
    return "usage", ok, detail
