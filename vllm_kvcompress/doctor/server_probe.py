"""A running server asked whether it compresses: one prompt, and what its metrics say about it."""

import json
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from vllm_kvcompress.doctor.checks import Check, Report, Tell
from vllm_kvcompress.doctor.probe_prompt import Limits
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.serving.exposition import PREFIX, Host, Metrics, Unreachable, error_message
from vllm_kvcompress.settings.config import CompressionConfig

# vLLM's figures follow its next step, which is waited for this long.
_PATIENCE_S = 15.0
_QUICK_S = 10.0
_SHOWN = (
    "method",
    "budget",
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
    tell: Tell,
    text: str,
    xargs: Mapping[str, Any],
    expect: bool | None,
    tokens: int | None,
    timeout_s: float,
) -> Report:
    """Prove over HTTP that a server compresses.

    Args:
        text: what the prompt is cut from.
        xargs: ``vllm_xargs`` of the request: its own method and budget, or nothing.
        expect: whether compression must be on; None where it may be either.
        tokens: length of the prompt; None for one that is just long enough.
    """
    checks: list[Check] = []

    def note(name: str, ok: bool, detail: str) -> bool:
        checks.append(Check(name=name, ok=ok, detail=detail))
        tell(checks[-1])
        return ok

    try:
        _examine(host, note, text, xargs, expect, tokens, timeout_s)
    except (Unreachable, ConfigError) as e:
        note("request" if checks else "server", False, str(e))
    return Report(checks=checks)


def _examine(
    host: Host,
    note: Callable[[str, bool, str], bool],
    text: str,
    xargs: Mapping[str, Any],
    expect: bool | None,
    tokens: int | None,
    timeout_s: float,
) -> None:
    status, _ = host.get("/health", _QUICK_S)
    model, longest = _model(host)
    if not note("server", status == 200, f"{host.url} serves {model}, /health answered {status}"):
        return
    before = host.metrics(_QUICK_S)
    if not _is_on(before, note, expect) or expect is False:
        return
    model, granted = _addressed(before.info or {}, model, xargs)
    limits = _limits(before, granted, longest)
    prompt = _prompt(host, model, text, limits, tokens)
    plan = limits.plan(len(prompt))
    if plan is None:
        raise ConfigError(
            f"a prompt of {len(prompt)} tokens is left whole by this server; pass --tokens"
            f" {limits.shortest()}"
        )
    during = _ask(host, model, prompt, limits, xargs, timeout_s)
    after = _settled(host, before)
    note(*_counted(before, after, limits.settings.compress))
    note(*_freed(before, after, plan))
    note(*_gauge(before, during, after, plan, limits))


def _model(host: Host) -> tuple[str, int]:
    status, text = host.get("/v1/models", _QUICK_S)
    if status != 200:
        hint = "; pass --api-key" if status == 401 else ""
        raise Unreachable(f"{host.url}/v1/models answered {status}: {error_message(text)}{hint}")
    first = json.loads(text)["data"][0]
    return str(first["id"]), int(first.get("max_model_len") or 1 << 30)


def _addressed(
    info: Mapping[str, str], model: str, xargs: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any]]:
    """The name to ask under, and what that asks for.

    A server that compresses nothing under its own name may do so under an alias.
    """
    if info.get("method") == "off" and not xargs:
        for name, meaning in json.loads(info.get("alias") or "{}").items():
            method, _, budget = meaning.partition(":")
            if budget:
                return name, {"kv_compress": method, "kv_budget": budget}
    return model, xargs


def _is_on(metrics: Metrics, note: Callable[[str, bool, str], bool], expect: bool | None) -> bool:
    info = metrics.info
    if info is None:
        detail = "off: the server does not export vllm:kv_compress_info"
        if expect:
            detail += (
                ", and it is expected on; start it with --kv-compress, and see in its log whether"
                " the plugin was loaded"
            )
        note("compression", not expect, detail)
        return False
    shown = ", ".join(f"{key} {info[key]}" for key in _SHOWN if info.get(key))
    if expect is False:
        note("compression", False, f"on ({shown}), and it is expected off")
        return False
    return note("compression", True, f"on: {shown}")


def _limits(metrics: Metrics, xargs: Mapping[str, Any], longest: int) -> Limits:
    """What the server says of itself decides how long the prompt must be."""
    info = dict(metrics.info or {})
    cache = metrics.of("vllm:cache_config_info")
    layers = {sample.labels.get("layer") for sample in metrics.of(f"{PREFIX}layer_tokens_total")}
    if not cache or not layers:
        raise Unreachable(
            "the server exports neither vllm:cache_config_info nor what each layer keeps; is it"
            " of another version than this command?"
        )
    gates = {
        "min_prompt": int(info.get("min_prompt", 1024)),
        "min_output": int(info.get("min_output", 2)),
    }
    if info.get("lookahead"):
        gates["lookahead"] = int(info["lookahead"])
    own: dict[str, Any] = {"compress": info.get("method", "off"), **gates}
    if own["compress"] != "off":
        own |= {"budget": info.get("budget", 0.2)}
        own |= {"window": int(info["window"])} if info.get("window") else {}
    method, budget = xargs.get("kv_compress"), xargs.get("kv_budget")
    if own["compress"] == "off" and method is None:
        raise ConfigError(
            "this server compresses only requests that ask for it; pass --kv-compress METHOD, one"
            f" of {info.get('allow_override')}"
        )
    if method is not None and method != own["compress"]:
        # as the server itself makes one method's settings of another's
        other = CompressionConfig.parse({"compress": "off", "allow_override": "all", **gates})
        own = other.variant(method).to_additional_config()
        own |= {"budget": info["budget"]} if "budget" in info else {}
    for key, value in (("budget", budget), ("lookahead", xargs.get("kv_lookahead"))):
        if value is not None:
            own[key] = value
    return Limits(
        settings=CompressionConfig.parse(own),
        # a pipeline's stages share out a budget each
        layers=len(layers) // int(info.get("stages", 1)),
        block_size=int(cache[0].labels["block_size"]),
        longest=longest,
    )


def _prompt(host: Host, model: str, text: str, limits: Limits, tokens: int | None) -> list[int]:
    """Token ids of a prompt that the server has not seen: it starts with something of its own."""
    length = limits.shortest() if tokens is None else tokens
    fresh = f"{uuid.uuid4()}\n\n{text[: 12 * length]}"
    status, answer = host.post("/tokenize", {"model": model, "prompt": fresh}, _QUICK_S)
    if status != 200:
        raise Unreachable(f"{host.url}/tokenize answered {status}: {error_message(answer)}")
    ids: list[int] = json.loads(answer)["tokens"]
    return (ids * (length // len(ids) + 1))[:length]


def _ask(
    host: Host,
    model: str,
    prompt: list[int],
    limits: Limits,
    xargs: Mapping[str, Any],
    timeout_s: float,
) -> list[tuple[int, Metrics]]:
    """Tokens computed at the least, and the metrics, at some moments of the answer."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 2 * limits.answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    if xargs:
        body["vllm_xargs"] = dict(xargs)
    moments = []
    for count, _ in enumerate(host.stream("/v1/completions", body, timeout_s)):
        if count and count % (limits.answer // 4) == 0:
            moments.append((len(prompt) + count, host.metrics(_QUICK_S)))
    return moments


def _settled(host: Host, before: Metrics) -> Metrics:
    """The metrics once they tell of a compressed prompt and of no request, or after a while."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        now = host.metrics(_QUICK_S)
        done = now.total(f"{PREFIX}requests_total") > before.total(f"{PREFIX}requests_total")
        idle = now.total("vllm:num_requests_running") == 0
        level = now.total("vllm:kv_cache_usage_perc") <= before.total("vllm:kv_cache_usage_perc")
        if (done and (level or not idle)) or time.monotonic() > end:
            return now
        time.sleep(0.2)


def _risen(name: str, before: Metrics, after: Metrics) -> float:
    return after.total(f"{PREFIX}{name}_total") - before.total(f"{PREFIX}{name}_total")


def _counted(before: Metrics, after: Metrics, method: str) -> tuple[str, bool, str]:
    planned, done = (_risen(name, before, after) for name in ("planned_requests", "requests"))
    if done >= 1:
        return "worker", True, f"{done:.0f} of {planned:.0f} planned prompts compressed ({method})"
    if planned >= 1:
        detail = (
            f"{planned:.0f} prompts were planned to be compressed and none was: compression is on"
            " and does not run; look in the server's log, and for another plugin that replaces"
            " vLLM's worker"
        )
        return "worker", False, detail
    reasons = {
        sample.labels.get("reason", ""): sample.value
        for sample in after.of(f"{PREFIX}skipped_requests_total")
    }
    for sample in before.of(f"{PREFIX}skipped_requests_total"):
        reasons[sample.labels.get("reason", "")] -= sample.value
    why = [reason for reason, count in reasons.items() if count >= 1]
    detail = f"the prompt was left whole ({', '.join(why) or 'for no reason that is counted'})"
    if why == ["low_pressure"]:
        detail += ": its pool is emptier than --kv-pressure; ask while it is busy"
    return "worker", False, detail


def _freed(before: Metrics, after: Metrics, plan: PagePlan) -> tuple[str, bool, str]:
    freed, taken = (_risen(name, before, after) for name in ("freed_blocks", "packed_blocks"))
    ok = freed > taken
    detail = (
        f"{freed:.0f} full blocks went back to the pool (this prompt has {plan.full_blocks}),"
        f" {taken:.0f} were taken for what is kept"
    )
    return "blocks", ok, detail if ok else f"{detail}: nothing was won"


def _gauge(
    before: Metrics,
    during: list[tuple[int, Metrics]],
    after: Metrics,
    plan: PagePlan,
    limits: Limits,
) -> tuple[str, bool, str]:
    """vLLM's own usage gauge, which says nothing of us: only an idle server's can be judged."""
    name = "vllm:kv_cache_usage_perc"
    numbers = [int(each.labels["layer"]) for each in after.of(f"{PREFIX}layer_tokens_total")]
    if max(numbers, default=0) >= len(set(numbers)):
        return "usage", True, "not judged: layers with a sliding window hold blocks too"
    alone = all(metrics.total("vllm:num_requests_running") <= 1 for _, metrics in during)
    if not during or not alone or before.total(name) or len(after.of(name)) != 1:
        return "usage", True, "not judged: the server is at work for others too"
    total = int(before.of("vllm:cache_config_info")[0].labels["num_gpu_blocks"]) - 1
    packed = [metrics for computed, metrics in during if computed > plan.tokens]
    blocks_in_use = [round(metrics.total(name) * total) for metrics in packed]
    last = limits.blocks_held(plan, plan.tokens + 2 * limits.answer)
    whole = -(-plan.tokens // plan.block_size)
    left = round(after.total(name) * total)
    ok = max(blocks_in_use) <= last and left == 0
    detail = (
        f"{max(blocks_in_use)} blocks in use while decoding, {last} are planned at most"
        f" ({whole} without compression), {left} afterwards"
    )
    return "usage", ok, detail
