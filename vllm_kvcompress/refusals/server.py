"""Servers that cannot compress: the settings, the model, and vLLM's options together."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcompress_kernels import k4v3
from vllm_kvcompress.methods.registry import PRESETS
from vllm_kvcompress.refusals import tested
from vllm_kvcompress.refusals.rule import UNTESTED, WITHOUT, Rule
from vllm_kvcompress.refusals.tested import PARK, REUSE, STATES

if TYPE_CHECKING:
    from vllm_kvcompress.planning.model_traits import Traits
    from vllm_kvcompress.settings.config import CompressionConfig

_MP = "set --distributed-executor-backend mp"
_TRANSFER = "--kv-transfer-config"
_OR_REUSE = "or --kv-reuse (got --kv-reuse {it.settings.packed.reuse})"
_NO_CONTEXT = "context parallelism splits one prompt over ranks, which is not supported"
_NO_OVERLAP = "dual-batch overlap splits a batch in two, which is not supported"
_ONLY_DEFAULTS: Mapping[str, str] = {
    "--attention-config.use_non_causal": "every token must attend only to the tokens before it",
    "--decode-context-parallel-size": _NO_CONTEXT,
    "--prefill-context-parallel-size": _NO_CONTEXT,
    "--data-parallel-backend": "data-parallel ranks as Ray actors are not tested",
    "--worker-cls": "compression runs only on vLLM's own workers, which it extends",
    "--scheduler-cls": "compression needs its own scheduler, which extends vLLM's",
    "--enable-elastic-ep": "elastic expert parallelism adds and removes ranks while requests run,"
    " which is not supported",
    "--enable-fault-tolerance": "a worker that survives a failed step would keep the compressed"
    " state of dropped requests",
    "--enable-dbo": _NO_OVERLAP,
    "--ubatch-size": _NO_OVERLAP,
    "--no-disable-cascade-attn": "cascade attention reads a shared prefix, which compressed"
    " requests no longer have",
    "--enable-return-routed-experts": "vLLM looks up the experts of a token by its KV block, and"
    " compression frees blocks of the prompt",
    "--kv-sharing-fast-prefill": "layers that share KV caches are not supported",
}
"""Option of vLLM that must keep its default -> why."""


class Executor(NamedTuple):
    """The class that sends steps to the workers.

    Args:
        name: as the user gave it, or the class's own name.
        base: the executor of `tested.EXECUTORS` that it is or inherits; "" for none.
        overridden: names of its own methods on the path of a step.
        fix: a fix that the message names before the one that always works.
    """

    name: str
    base: str
    overridden: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server before it starts. A caller leaves out what it does not know.

    Args:
        settings: compression settings of the engine.
        model: traits of the model.
        name: the model's name.
        head_dim: dimension of each head.
        itemsize: bytes of a cached number.
        block_size: tokens in a KV block.
        max_model_len: maximum tokens of a prompt and its output together.
        options: set options of vLLM by flag or environment variable. --kv-transfer-config maps to
            the connector's name, and its keys are entries of their own. Parallel sizes of 1 are
            left out. `tested.IMAGES` is there if the model takes images.
        device: "cpu", "cuda", or vLLM's name of another device.
        executor: None if it is not known.
        stages: compressed layers of each pipeline stage.
        vllm: version of vLLM.
        host_bytes: memory of the machine; 0 if it is not known.
    """

    settings: "CompressionConfig"
    model: "Traits"
    name: str = ""
    head_dim: int | None = None
    itemsize: int = 2
    block_size: int | None = None
    max_model_len: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    executor: Executor | None = None
    stages: tuple[int, ...] = ()
    vllm: str = ""
    host_bytes: int = 0

    @property
    def host_gib(self) -> str:
        """Return the memory of the machine as text, in GiB rounded down to tenths."""
        return f"{math.floor(self.host_bytes / 2**30 * 10) / 10}"

    @property
    def features(self) -> set[str]:
        """Return the options in use, and the features that the model and the settings use."""
        layers = self.model.groups
        used = {
            tested.WINDOWS: layers.windowed,
            STATES: layers.stateful,
            REUSE: self.settings.packed.reuse != "off",
            PARK: self.settings.park is not None,
        }
        return {*self.options, *(feature for feature, is_used in used.items() if is_used)}


def _untested_pair(server: Server) -> tuple[str, str, str] | None:
    """Return two features that were not tested together, and how to do without one."""
    used = server.features
    for pair in tested.untested_pairs():
        if used.issuperset(pair):
            flags = " or ".join(name for name in pair if name.startswith("--"))
            return *pair, f"remove {flags}" if flags else WITHOUT
    return None


def _only_default(flag: str, reason: str) -> Rule[Server]:
    """Return the rule for an option that must keep its default."""

    def fix(server: Server) -> str:
        value = server.options.get(flag)
        return "" if not value else f"remove {flag}{'' if value is True else f', got {value}'}"

    return Rule(name=f"`{flag}`", when=fix, reason=reason, fix="{found}")


def _other(server: Server, option: str, accepted: tuple[str, ...]) -> Any:
    """Return the value of an option that is set to none of the accepted ones."""
    value = server.options.get(option)
    return None if value in accepted else value


def _unequal_stages(server: Server) -> tuple[str, int, list[int]] | None:
    """Return how to get pipeline stages with equal numbers of layers, their number and layers."""
    if len(set(server.stages)) < 2:
        return None
    layers, size = sum(server.stages), len(server.stages)
    fix = f"set --pipeline-parallel-size to a divisor of {layers}"
    if layers % size == 0:
        fix = "unset VLLM_PP_LAYER_PARTITION"
    return fix, size, list(server.stages)


def _flags_of_repetition(server: Server) -> str:
    """Return the flags that compress a request more than once."""
    settings = server.settings
    is_set = {
        "--kv-decode-budget": settings.decode.budget is not None,
        "--kv-max-whole": settings.pieces.max_whole is not None,
        "--kv-decode-interval": any(variant.packs_outputs for variant in settings.variants),
    }
    return " and ".join(flag for flag, given in is_set.items() if given)


def _other_formats(server: Server) -> tuple[str, str] | None:
    """Return a format of cached tokens other than the model's dtype, and how to do without it."""
    if server.settings.packs_k4v3:
        return "k4v3", "set packed_dtype to auto"
    if server.model.has_fp8_cache:
        return "an fp8 KV cache", f"set {server.model.plain_cache}"
    return None


def _needs_whole_prompt(server: Server) -> tuple[str, str, "CompressionConfig", list[str]] | None:
    """Return a flag, its purpose, a method that cannot do it, and the presets that can."""
    settings = server.settings
    parse = type(settings).parse
    for flag, value, purpose in (
        ("--kv-decode-budget", settings.decode.budget, "bound outputs"),
        ("--kv-max-whole", settings.pieces.max_whole, "pack prompts"),
    ):
        for variant in settings.variants if value is not None else ():
            if variant.method.needs_whole_prompt:
                presets = {name: parse({"compress": name}).method for name in sorted(PRESETS)}
                able = [name for name, each in presets.items() if not each.needs_whole_prompt]
                return flag, purpose, variant, able
    return None


def _part_of_a_block(server: Server) -> tuple[str, int, int] | None:
    """Return a flag that is not a multiple of the KV block, its tokens, and a value that is."""
    settings, block = server.settings, server.block_size
    for key, limit in (
        ("decode_interval", settings.decode.budget),
        ("piece", settings.pieces.max_whole),
    ):
        # Defaults are rounded to whole blocks.
        tokens = settings.value(key)
        if block and limit is not None and key in settings.given_keys and tokens % block:
            flag = f"--kv-{key.replace('_', '-')}"
            return flag, tokens, max(tokens // block, 1) * block
    return None


def _block_without_groups(server: Server) -> tuple[str, str] | None:
    """Return why a block does not hold whole groups of packed tokens, and how it would."""
    dim, itemsize = server.head_dim, server.itemsize
    if dim is None or not server.settings.packs_k4v3:
        return None
    rows = k4v3.rows_per_group(itemsize)
    if reason := k4v3.refusal(dim, rows, itemsize):
        return reason, ""
    if server.block_size and (reason := k4v3.refusal(dim, server.block_size, itemsize)):
        return reason, f"set --block-size {max(server.block_size // rows, 1) * rows}, or "
    return None


def _step_without_a_probe(server: Server) -> tuple[str, int, str, int, int, str] | None:
    """Return the flag of a limit that is too small for a probe, and the parts of its message.

    They are the probe's tokens, the tokens before the probe as text, the smallest value of the
    flag, its value, and another flag to lower.
    """
    probe = max((variant.method.probe_tokens for variant in server.settings.variants), default=0)
    requests = server.options.get("--max-num-seqs", 1)
    for flag, before, other_flag, min_tokens in (
        ("--max-num-batched-tokens", "one token per request", " --max-num-seqs,", requests),
        ("--max-num-scheduled-tokens", "one token per request", " --max-num-seqs,", requests),
        ("--long-prefill-token-threshold", "one token", "", 1),
    ):
        limit = server.options.get(flag)
        if probe and limit and limit < probe + min_tokens:
            return flag, probe, before, probe + min_tokens, limit, other_flag
    return None


def _unreachable_length(server: Server) -> tuple[str, int] | None:
    """Return a setting in tokens that no request reaches, and its value."""
    settings, given = server.settings, server.settings.given_keys
    lows = [low for low, _ in settings.budget_bounds if isinstance(low, int)]
    lengths = {
        "--kv-budget": settings.budget,
        "the smallest of --kv-budget-bounds": max(lows, default=None),
        "--kv-decode-budget": settings.decode.budget,
        "--kv-decode-interval": settings.decode.interval if "decode_interval" in given else None,
        "--kv-min-prompt": settings.min_prompt if "min_prompt" in given else None,
        "--kv-min-output": settings.min_output,
        "--kv-max-whole": settings.pieces.max_whole,
        "--kv-piece": settings.pieces.length if "piece" in given else None,
        **{f"the budget of --kv-alias {alias.name}": alias.budget for alias in settings.alias},
    }
    for name, tokens in lengths.items():
        if isinstance(tokens, int) and server.max_model_len and tokens > server.max_model_len:
            return name, tokens
    return None


def _long_window(server: Server) -> int | None:
    window = max((variant.resolved_window for variant in server.settings.variants), default=0)
    return window if server.max_model_len and window >= server.max_model_len else None


def draft_facts(
    method: str, values: Mapping[str, Any], modules: int | None
) -> Iterator[tuple[str, Any]]:
    """Yield what rules read about drafts, as in `Server.options`, also unset facts.

    Args:
        method: vLLM's name of the method.
        values: fields of ``--speculative-config``, defaults may be left out.
        modules: number of MTP modules; None if the method is another one.
    """
    yield "--speculative-config", method
    if method in tested.DRAFT_MODELS:
        yield tested.DRAFT_LAYERS, True
        options = tested.DRAFT_OPTIONS.items()
        changed = (name for name, default in options if values.get(name, default) != default)
        yield tested.DRAFT_OPTION, next(changed, None)
        yield tested.MTP_MODULES, modules if modules and modules > 1 else None


DRAFT_SHAPE: Rule[str] = Rule(
    when=lambda name: name,
    reason="needs draft layers with the target's KV heads, head size, dtype and full attention, but"
    " {found} differs",
    fix="draft from the prompt with --speculative-config"
    f' \'{{{{"method": "{tested.DRAFTS}", ...}}}}\', or remove --speculative-config',
)
"""For the name of a draft layer, or of a draft model, that differs from the target; "" for none."""
RUST_FRONT_END: Rule[Any] = Rule(
    name="vLLM's Rust front end",
    when=lambda s: s.options.get("VLLM_USE_RUST_FRONTEND"),
    reason="the Rust front end does not check compression settings of requests, count them, or"
    " serve further model names",
    fix="unset VLLM_USE_RUST_FRONTEND",
    because="it would not check the `kv_` keys of requests",
)
LAYERS: tuple[Rule[Server], ...] = (
    Rule(
        when=_part_of_a_block,
        reason="{found[0]} must be a multiple of the KV block's {it.block_size} tokens, got"
        " {found[1]}",
        fix="set it to {found[2]}",
    ),
    Rule(
        name="`--kv-packed-dtype k4v3` with heads smaller than 64 or not a multiple of 8, or with"
        " KV blocks that are not a multiple of 16 tokens (8 in a float32 cache)",
        when=_block_without_groups,
        reason="{found[0]}",
        fix="{found[1]}set packed_dtype to auto",
        because="a block must hold whole groups of 64 packed tokens, each in the memory of 16",
    ),
)
"""Rules that workers check again: vLLM chooses the block size of models with states late."""

SERVER: tuple[Rule[Server], ...] = (
    Rule(
        when=lambda s: s.device not in tested.DEVICES and s.device,
        reason="it runs only on CUDA and on CPUs, and this is {found}",
        fix="serve without --kv-compress on this machine",
    ),
    Rule(
        name="V1's model runner on CUDA",
        when=lambda s: s.options.get("VLLM_USE_V2_MODEL_RUNNER"),
        reason="on CUDA it runs only on Model Runner V2",
        fix="{found}",
        because=UNTESTED,
    ),
    Rule(
        name="Other attention backends",
        when=lambda s: _other(s, "--attention-backend", tested.CUDA_BACKENDS),
        reason=f"the attention backend must be one of {list(tested.CUDA_BACKENDS)}, got {{found}}",
        fix=f"pass --attention-backend {tested.CUDA_BACKENDS[0]}, and remove"
        " --attention-config.backend_per_kind if it is set",
        because=UNTESTED,
    ),
    Rule(
        name="Sliding windows or states with `--disable-hybrid-kv-cache-manager`",
        when=lambda s: (
            s.model.groups.num_uncompressed and s.options.get("--disable-hybrid-kv-cache-manager")
        ),
        reason="layers with a sliding window or a state need their own KV cache group",
        fix="remove --disable-hybrid-kv-cache-manager, and the option that turned the manager off"
        " according to vLLM's log",
    ),
    Rule(
        name="Pipeline stages with unequal numbers of layers",
        when=_unequal_stages,
        reason="every pipeline stage must have the same number of layers, because all stages use"
        " the same block table",
        fix="{found[0]}, got {found[1]} with {found[2]}",
    ),
    Rule(
        name="Other executors, such as `external_launcher` and Ray's older one"
        " (`VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0`)",
        when=lambda s: s.executor and not s.executor.base and s.executor,
        reason=f"every step must go through the worker, and only {list(tested.EXECUTORS)} are known"
        " to do that",
        fix=f"{{found.fix}}{_MP}, got {{found.name}}",
        because="they bypass the plugin's worker, or schedule independently",
    ),
    Rule(
        name="Executors that do not inherit vLLM's path to the worker",
        when=lambda s: s.executor and s.executor.overridden and s.executor,
        reason="every step must go through the worker, and {found.name} overrides"
        " {found.overridden}",
        fix=f"{_MP}, or inherit them from {{found.base}}",
        because="they bypass the plugin's worker",
    ),
    Rule(
        name="Other drafts",
        when=lambda s: _other(s, "--speculative-config", (tested.DRAFTS, *tested.DRAFT_MODELS)),
        reason="drafting with {found} is not tested",
        fix="draft from the prompt with --speculative-config"
        f' \'{{{{"method": "{tested.DRAFTS}", ...}}}}\', or remove --speculative-config and the'
        " --spec- flags, and name {it.name} itself as the model instead of a speculator for it",
        because=UNTESTED,
    ),
    Rule(
        name="Several MTP modules",
        when=lambda s: s.options.get(tested.MTP_MODULES),
        reason="this model drafts with {found} MTP modules, but only one was tested",
        fix="draft from the prompt with --speculative-config"
        f' \'{{{{"method": "{tested.DRAFTS}", ...}}}}\', or remove --speculative-config',
        because=UNTESTED,
    ),
    Rule(
        name="Other draft options",
        when=lambda s: s.options.get(tested.DRAFT_OPTION),
        reason="draft layers are only tested with the default of {found}",
        fix="remove {found} from --speculative-config",
        because=UNTESTED,
    ),
    Rule(
        name="Draft layers with k4v3 or fp8 caches",
        when=lambda s: tested.DRAFT_LAYERS in s.options and _other_formats(s),
        reason="draft layers are not tested with {found[0]}",
        fix="{found[1]}, or draft from the prompt with --speculative-config"
        f' \'{{{{"method": "{tested.DRAFTS}", ...}}}}\', or remove --speculative-config',
        because=UNTESTED,
    ),
    RUST_FRONT_END,
    *(_only_default(flag, reason) for flag, reason in _ONLY_DEFAULTS.items()),
    Rule(
        name="`SimpleCPUOffloadConnector` (`VLLM_USE_SIMPLE_KV_OFFLOAD`) without `lazy_offload`",
        when=lambda s: s.options.get("eager offloading"),
        reason=f"without lazy_offload, {tested.SIMPLE_CONNECTOR} stores blocks by their position in"
        " a request, which compression changes, so it would store nothing",
        fix=f'set "lazy_offload": true in kv_connector_extra_config of {_TRANSFER}, or use'
        f" {tested.OFFLOADING_CONNECTOR} (unset VLLM_USE_SIMPLE_KV_OFFLOAD)",
        because="it finds blocks by position, so it would store nothing",
    ),
    Rule(
        name="`SimpleCPUOffloadConnector` without prefix caching",
        when=lambda s: (
            s.options.get(tested.OFFLOADING) == tested.SIMPLE_CONNECTOR
            and s.options.get("--no-enable-prefix-caching")
        ),
        reason=f"{tested.SIMPLE_CONNECTOR} stores only blocks of the prefix cache, so it would"
        " store nothing",
        fix=f"remove --no-enable-prefix-caching, or use {tested.OFFLOADING_CONNECTOR} (unset"
        " VLLM_USE_SIMPLE_KV_OFFLOAD)",
        because="it stores only blocks of the prefix cache",
    ),
    Rule(
        name="Other KV connectors (LMCache, Mooncake, `MultiConnector`, `NixlPushConnector`, other"
        " packages')",
        when=lambda s: (
            s.options.get("kv_connector_module_path") or _other(s, _TRANSFER, tested.CONNECTORS)
        ),
        reason="of the KV connectors only"
        f" {[*tested.CONNECTORS, *tested.OFFLOADING_KEYS]} are tested; others find"
        " saved tokens by their position or hash, which compressed blocks do not have, or push"
        " blocks into waiting prompts",
        fix=f"set kv_connector to {tested.CONNECTORS[0]!r} or {tested.OFFLOADING_CONNECTOR!r} in"
        f" {_TRANSFER} without kv_connector_module_path, or remove {_TRANSFER} (or"
        " --kv-offloading-backend), got {found!r}",
        because="they find blocks by position or hash, and compressed blocks hold other tokens; or"
        " they were not tested",
    ),
    Rule(
        name="`NixlConnector` as `kv_producer` or `kv_both`, or with `bidirectional_kv_xfer`",
        when=lambda s: s.options.get("kv_role"),
        reason="the other server reads the blocks of a prompt by position, and compression frees"
        " those blocks, so only a decode server that sends nothing can compress",
        fix=f"set kv_role 'kv_consumer' and remove bidirectional_kv_xfer in {_TRANSFER}, or serve"
        " without --kv-compress, got {found!r}",
        because="the other server reads a prompt's blocks by position, and compression has freed"
        " them",
    ),
    Rule(
        name="`NixlConnector` without a look-ahead, also in `--kv-allow-override` and `--kv-alias`",
        when=lambda s: (
            _TRANSFER in s.options
            and [each.compress for each in s.settings.variants if not each.resolved_lookahead]
        ),
        reason="a decode server computes only the last tokens of a prompt, so it has no observation"
        " window and must score with output tokens: pass --kv-lookahead with 1 or more tokens,"
        " and leave methods that have none out of --kv-allow-override and --kv-alias",
        fix="got {found} with a look-ahead of 0",
        because="a decode server computes only a prompt's last tokens, so output queries must"
        " score it",
    ),
    Rule(
        name="`NixlConnector` with `--kv-max-whole`",
        when=lambda s: _TRANSFER in s.options and s.settings.pieces.max_whole,
        reason="a pulled prompt arrives at once, so it cannot be compressed piece by piece",
        fix="remove --kv-max-whole, got {found}",
    ),
    Rule(
        name="Offloading with `offload_prompt_only: false`",
        when=lambda s: s.options.get("offload_prompt_only"),
        reason="output tokens behind a compressed prompt were computed from its kept tokens, so"
        " they must not be stored under the hash of all tokens",
        fix="remove offload_prompt_only from kv_connector_extra_config, or set it to true",
        because="output tokens depend on the kept tokens, but their hash on all tokens",
    ),
    Rule(
        name="Offloading with `--kv-max-whole`",
        when=lambda s: tested.OFFLOADING in s.options and s.settings.pieces.max_whole,
        reason="later pieces of a prompt are computed from kept tokens, so they must not be stored"
        " under the hash of all tokens",
        fix="remove --kv-max-whole, got {found}",
        because="later pieces depend on the kept tokens, but their hash on all tokens",
    ),
    Rule(
        name="Other settings of offloading, and KV events with it",
        when=lambda s: (
            (fix := s.options.get("an offloading option"))
            and (fix, name := s.options[tested.OFFLOADING], [*tested.OFFLOADING_KEYS[name]])
        ),
        reason="{found[1]} is only tested as kv_both, without KV events, and with at most the keys"
        " {found[2]} in kv_connector_extra_config, and spec_name CPUOffloadingSpec",
        fix="{found[0]}",
        because=UNTESTED,
    ),
    Rule(
        when=_untested_pair,
        reason="{found[0]} and {found[1]} were not tested together",
        fix="{found[2]}",
    ),
    Rule(
        name="States or offloading on vLLM 0.31 and 0.33",
        when=lambda s: (
            s.features & {STATES, tested.OFFLOADING}
            and s.vllm
            and not tested.STATE_VLLM.contains(s.vllm, True)
        ),
        reason="models whose layers keep a state, and offloading, are tested only on vLLM 0.32",
        fix="install it, got {it.vllm}",
        because=UNTESTED,
    ),
    Rule(
        when=lambda s: (
            STATES in s.features
            and s.options.get("--mamba-cache-mode") == "align"
            and not s.model.may_cache_states
        ),
        reason="saving states inside a step is not tested, because vLLM's CPU build crashes there"
        " (IndexError in mamba_mixer2.py)",
        fix="add --no-enable-prefix-caching",
    ),
    Rule(
        name="With layers that keep a state:"
        " [probes and others](#layers-that-keep-a-state-beside-full-ones)",
        when=lambda s: (
            STATES in s.features
            and any(each.method.probe_tokens for each in s.settings.variants)
            and (
                f" with --kv-probe-first {first}"
                if (first := s.settings.pieces.probe_first)
                else "",
            )
        ),
        reason="a probe's rows would advance the states, which cannot be rolled back",
        fix="set --kv-probe 0, got {it.settings.pieces.probe}{found[0]}",
    ),
    Rule(
        name="An fp8 KV cache with methods that merge (`d2o`, `merge`)",
        when=lambda s: (
            s.model.has_fp8_cache
            and next((each for each in s.settings.variants if each.method.merge), None)
        ),
        reason="{found.compress!r} merges tokens, which would have to be quantised again in a"
        " {it.model.stored} KV cache",
        fix="choose a method that does not merge, or set {it.model.plain_cache}",
        because="merged tokens would have to be quantised again",
    ),
    Rule(
        name="`--kv-packed-dtype k4v3` with an fp8 KV cache",
        when=lambda s: s.model.has_fp8_cache and s.settings.packs_k4v3,
        reason="packed_dtype=k4v3 cannot be combined with a {it.model.stored} KV cache, because its"
        " tokens would be quantised twice",
        fix="set {it.model.plain_cache}, or set packed_dtype to auto",
        because="tokens would be quantised twice",
    ),
    Rule(
        name="`--kv-cache-dtype-skip-layers`",
        when=lambda s: s.model.has_fp8_cache and s.options.get("--kv-cache-dtype-skip-layers"),
        reason="all layers must use the same KV cache dtype",
        fix="remove --kv-cache-dtype-skip-layers, got {found}",
    ),
    Rule(
        name="`--calculate-kv-scales`",
        when=lambda s: s.model.has_fp8_cache and s.options.get("--calculate-kv-scales"),
        reason="quantisation scales must stay the same while tokens are cached",
        fix="remove --calculate-kv-scales, and serve a checkpoint that includes its scales",
    ),
    Rule(
        when=lambda s: (
            REUSE in s.features and not any(each.reuses_pages for each in s.settings.variants)
        ),
        reason="--kv-reuse needs --kv-budget 1.0 and --kv-packed-dtype k4v3",
        fix="set both, or remove --kv-reuse, got budget {it.settings.budget} and"
        " {it.settings.resolved_packed_dtype}",
    ),
    Rule(
        name="`--kv-reuse` with `--kv-pressure`",
        when=lambda s: REUSE in s.features and s.settings.pressure,
        reason="cached pages do not count as used, so --kv-pressure would leave a later turn"
        " uncompressed, and it could not read them",
        fix=f"remove --kv-pressure, {_OR_REUSE}",
    ),
    Rule(
        name="`--kv-reuse` without prefix caching",
        when=lambda s: REUSE in s.features and s.options.get("--no-enable-prefix-caching"),
        reason="--kv-reuse needs prefix caching",
        fix=f"remove --no-enable-prefix-caching, {_OR_REUSE}",
        because="later turns find their pages in the prefix cache",
    ),
    Rule(
        when=lambda s: REUSE in s.features and s.options.get("--kv-events-config"),
        reason="KV events of packed pages need BlockPool.emit_cached_block_events, which this vLLM"
        " lacks",
        fix=f"remove --kv-events-config, {_OR_REUSE}",
    ),
    Rule(
        name="Drafts with `--kv-decode-budget`, `--kv-max-whole` or packed outputs",
        when=lambda s: "--speculative-config" in s.options and _flags_of_repetition(s),
        reason="requests compressed more than once are compressed at exact lengths, which drafts"
        " can skip or roll back",
        fix="remove --speculative-config, or {found}",
        because="repeated compression starts at exact lengths, which a step with drafts can skip",
    ),
    Rule(
        name="`--kv-park` with `--kv-decode-budget` or `--kv-decode-interval`",
        when=lambda s: (
            s.settings.park
            and (
                (s.settings.decode.budget and "--kv-decode-budget")
                or (s.settings.packs_outputs and "--kv-decode-interval")
            )
        ),
        reason="only requests that need no more packing can be parked, and {found} packs again",
        fix="remove --kv-park {it.settings.park}, or {found}",
        because="only requests that need no more packing can be parked",
    ),
    Rule(
        when=lambda s: s.host_bytes and (s.settings.park or 0) * 2**30 > s.host_bytes,
        reason="--kv-park must be at most the memory of this machine, {it.host_gib} GiB, got"
        " {it.settings.park}",
        fix="lower it, and leave memory for the process",
    ),
    Rule(
        when=_long_window,
        reason="the observation window must be shorter than --max-model-len",
        fix="set --kv-window below {it.max_model_len}, got {found}",
    ),
    Rule(
        when=_unreachable_length,
        reason="{found[0]} must be at most --max-model-len {it.max_model_len}, because no request"
        " is longer and the setting would have no effect; got {found[1]}",
        fix="lower it, or raise --max-model-len",
    ),
    Rule(
        name="`--kv-decode-budget` and `--kv-max-whole` with methods that read keys, value norms"
        " or all layers' scores, CAOTE over `h2o`, or `random`",
        when=_needs_whole_prompt,
        reason="{found[0]} cannot {found[1]} by {found[2].compress!r}:"
        " {found[2].method.needs_whole_prompt}",
        fix="choose from {found[3]}, or remove {found[0]}",
        because="[they cannot score](methods.md#7-decode) a prompt that has lost tokens",
    ),
    *LAYERS,
    Rule(
        when=_step_without_a_probe,
        reason="a step must have space for {found[2]} and then a probe of {found[1]} tokens",
        fix="set {found[0]} to at least {found[3]}, got {found[4]}, or lower{found[5]} --kv-probe"
        " or --kv-probe-first",
    ),
)
"""Rules for a server that is about to start."""
