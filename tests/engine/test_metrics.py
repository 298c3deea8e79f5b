"""Compression metrics: right values, each request counted once, and a label for each engine."""

import itertools
import json
import random

import hypothesis
import pytest
from hypothesis import strategies as st

from checkpoints import make, tokens
from configuring import configure
from engines import BLOCK, engine, settings
from vllm_kvcompress.commands.plan.command import make_plan
from vllm_kvcompress.commands.plan.options import PlanOptions
from vllm_kvcompress.engine.compression import reports
from vllm_kvcompress.engine.frontend.metrics import info_labels
from vllm_kvcompress.engine.messages.step import BUDGET, HALF
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.methods.registry import PRESETS
from vllm_kvcompress.planning.packed_pages import packed_page_tokens
from vllm_kvcompress.schedules.kv_footprint import KVFootprint
from vllm_kvcompress.schedules.outputs import OutputGroupSchedule, OutputSchedule
from vllm_kvcompress.schedules.pieces import piece_schedule
from vllm_kvcompress.schedules.prompt import PromptSchedule
from vllm_kvcompress.schedules.request import lookahead_tokens_of
from vllm_kvcompress.serving.process import compressed_requests
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.request_options import RequestOptions

LAYERS = 4


def samples(**labels):
    """Return the plugin's metric samples with these labels, by name and values of other labels."""
    from prometheus_client import REGISTRY

    found = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            name = sample.name.removeprefix("vllm:kv_compress_")
            if name == sample.name or name.endswith("_created"):
                continue
            if labels.items() <= sample.labels.items():
                other_labels = set(sample.labels) - {"model_name", "engine", *labels}
                key = name, *(sample.labels[label] for label in sorted(other_labels))
                found[key] = sample.value
    return found


def plan_of(length, budget=0.3, compress="cake"):
    config = CompressionConfig.parse({"compress": compress, "budget": budget, "min_prompt": 128})
    return page_plan(config.budget_spec(LAYERS, length), BLOCK)


def test_metrics_match_the_page_plans(model):
    lengths = [130, 400, 401, 500, 512]
    with engine(model, additional_config=settings("pyramidkv", 0.3)) as llm:
        assert samples()["planned_requests_total", "pyramidkv"] == 0
        assert samples()["skipped_requests_total", "low_pressure"] == 0
        assert samples()["layer_tokens_total", str(LAYERS - 1)] == 0
        for length in lengths:  # one at a time, because shared blocks would not be freed
            llm.generate([tokens(length, seed=length)], 6)
        llm.generate([tokens(50, seed=1)], 6)
        llm.finish_in_flight_steps()
        values = samples(engine="0")
    plans = [plan_of(length, compress="pyramidkv") for length in lengths]
    kept_tokens = sum(plan.pages * BLOCK / LAYERS + plan.tail for plan in plans)
    assert (
        values["requests_total", "pyramidkv"]
        == values["planned_requests_total", "pyramidkv"]
        == len(lengths)
    )
    assert values["skipped_requests_total", "short_prompt"] == 1
    assert values["prompt_tokens_total",] == sum(lengths)
    assert values["kept_tokens_total",] == pytest.approx(kept_tokens)
    assert values["freed_blocks_total",] == sum(plan.full_blocks for plan in plans)
    assert values["packed_blocks_total",] == sum(plan.blocks for plan in plans)
    assert values["in_place_requests_total",] == 0
    layer_tokens = [values["layer_tokens_total", str(layer)] for layer in range(LAYERS)]
    assert sum(layer_tokens) == pytest.approx(kept_tokens * LAYERS)
    assert len(set(layer_tokens)) > 1
    assert values["ratio_count",] == values["seconds_count",] == len(lengths)
    assert 0 < values["ratio_sum",] < len(lengths)
    assert 0 < values["seconds_sum",] < 60
    assert values["budget", "ratio"] == 0.3
    assert sum(name == "info" for name, *_ in values) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_request_is_counted_once(model, asynchronous, async_scheduling_allowed):
    """Every request is planned or skipped, despite aborts, preemptions and overrides.

    Planned requests are packed, unless they are aborted in between. Each output reports the
    request's last packing.
    """
    rng = random.Random(11)
    with engine(
        model,
        additional_config=settings("cake", 0.3, allow_override="all", pressure=0.2, usage=True),
        blocks=1 + 40,
        max_num_batched_tokens=256,
        max_num_seqs=16,
        max_model_len=900,
        async_scheduling=asynchronous,
    ) as llm:
        preemptions = llm.watch_preemptions()
        last_packing, outputs = {}, {}

        def note(done, pages):
            last_packing[done.pack_request.request_id] = done.pack_request, pages.tolist()

        llm.watch_packing(lambda done: done, note)
        for index in range(40):
            override = rng.choice([None, {"kv_compress": "off"}, {"kv_compress": "snapkv"}])
            prompt = tokens(rng.randint(20, 700), seed=index)
            llm.submit(str(index), prompt, rng.randint(2, 60), extra_args=override)
            outputs |= llm.step()
            if index % 9 == 8:
                llm.llm.llm_engine.abort_request([str(index)])
        while llm.llm.llm_engine.has_unfinished_requests():
            outputs |= llm.step()
        llm.finish_in_flight_steps()
        assert len(llm.scheduler.usage_notes) == 0
        num_packed = llm.compressor.compressed
        num_decisions = len(llm.scheduler.states)
        cache = llm.scheduler.kv_cache_config
        block_bytes = sum(tensor.size for tensor in cache.kv_cache_tensors) // cache.num_blocks
        values = samples()
    skipped = {key[1]: n for key, n in values.items() if key[0] == "skipped_requests_total"}
    planned = sum(n for key, n in values.items() if key[0] == "planned_requests_total")
    completed = sum(n for key, n in values.items() if key[0] == "requests_total")
    num_preemptions = sum(len(times) for times in preemptions.values())
    assert num_decisions <= 1  # ended requests are forgotten
    assert completed == planned == num_packed
    assert num_packed - len(last_packing) <= num_preemptions  # only preempted ones are repacked
    packings = {request_id.split("-")[0]: done for request_id, done in last_packing.items()}
    assert {name for name, output in outputs.items() if output.kv_compress is not None} == {
        name for name in packings if name in outputs
    }
    for name in packings.keys() & outputs.keys():
        pack_request, pages = packings[name]
        plan = pack_request.plan
        layer_tokens = [count * BLOCK + plan.tail for count in pages]
        assert outputs[name].kv_compress == {
            "method": pack_request.settings.compress,
            "budget": 0.3,
            "packed_dtype": "auto",
            "prompt_tokens": plan.tokens,
            "kept_tokens": sum(layer_tokens) / LAYERS,
            "kept_bytes": -(-sum(layer_tokens) // (LAYERS * BLOCK)) * block_bytes,
            "uncompressed_bytes": -(-plan.tokens // BLOCK) * block_bytes,
            "layer_tokens": layer_tokens,
        }
        assert outputs[name].kv_transfer_params is None
    assert len(packings.keys() & outputs.keys()) > 10
    # Four requests were aborted: before they were admitted, during the prefill or later.
    assert 36 <= sum(skipped.values()) + len(packings) <= 40
    assert {name for name, count in skipped.items() if count} >= {"off", "short_prompt"}


def test_usage_and_metrics_of_both_formats(checkpoints_folder):
    """A float32 block of 32 tokens holds 256 tokens in k4v3."""
    wide = make("qwen3", checkpoints_folder)
    config = settings("cake", 0.4, allow_override="all", packed_dtype="k4v3", usage=True)
    prompt, usage = tokens(1000, seed=1), {}
    with engine(wide, additional_config=config, enable_prefix_caching=False) as llm:
        cache = llm.scheduler.kv_cache_config
        block_bytes = sum(tensor.size for tensor in cache.kv_cache_tensors) // cache.num_blocks
        for packed_dtype, budget in (("k4v3", 0.4), ("k4v3", 1.0), ("auto", 0.4)):
            extra_args = {"kv_packed_dtype": packed_dtype, "kv_budget": budget}
            llm.submit("r", prompt, 6, extra_args=extra_args)
            outputs = {}
            while llm.llm.llm_engine.has_unfinished_requests():
                outputs |= llm.step()
            usage[packed_dtype, budget] = outputs["r"].kv_compress
        llm.finish_in_flight_steps()
        values = samples(engine="0")
    for (packed_dtype, budget), report in usage.items():
        assert (report["packed_dtype"], report["budget"]) == (packed_dtype, budget)
        assert report["kept_tokens"] == sum(report["layer_tokens"]) / 3
    assert usage["k4v3", 0.4]["kept_bytes"] == (1 + 1 + 2) * block_bytes
    assert usage["k4v3", 1.0]["kept_bytes"] == (1 + 3 + 7) * block_bytes
    assert usage["k4v3", 1.0]["layer_tokens"] == [1000] * 3
    assert usage["auto", 0.4]["kept_bytes"] == (12 + 1) * block_bytes
    assert {report["uncompressed_bytes"] for report in usage.values()} == {32 * block_bytes}
    total = sum(report["kept_tokens"] for report in usage.values())
    assert values["kept_tokens_total",] == pytest.approx(total)
    assert values["packed_blocks_total",] == 1 + 3 + 12


LOOKAHEAD = 32
# settings, further options of the engine, and how many prompts are submitted together
FIGURES = {
    "default": ({"compress": "cake-chunk", "budget": 0.5}, {}, 1),
    "no look-ahead": ({"compress": "cake-chunk", "budget": 0.5, "lookahead": 0}, {}, 1),
    "short window": ({"compress": "cake", "budget": 0.3, "window": 8}, {}, 1),
    "last query": ({"compress": "tova", "budget": 0.3}, {}, 1),
    "protected": (
        {"compress": "snapkv", "budget": 0.4, "allow_override": "all"}, {"protect": "3:90"}, 1,
    ),
    "k4v3": ({"compress": "cake-chunk", "budget": 0.4, "packed_dtype": "k4v3"}, {}, 1),
    "all in k4v3": ({"compress": "cake-chunk", "budget": 1.0, "packed_dtype": "k4v3"}, {}, 1),
    "pieces": ({"compress": "cake-chunk", "budget": 0.4, "max_whole": 450, "piece": 192}, {}, 1),
    "in place": ({"compress": "cake-chunk", "budget": 0.5}, {"blocks": 1 + 25}, 1),
    "cut": ({"compress": "cake-chunk", "budget": 0.3}, {"blocks": 1 + 62}, 3),
}  # fmt: skip


@pytest.mark.parametrize("case", FIGURES)
def test_figures_are_those_of_the_blocks_and_tokens_that_requests_hold(
    case, checkpoints_folder, monkeypatch
):
    """Usage, metrics and log name the prompt's tokens, without those of its look-ahead."""
    config, options, together = FIGURES[case]
    options = dict(options)
    extra_args = {"kv_protect": options.pop("protect")} if "protect" in options else {}
    lines, packed, held, outputs = [], {}, {}, {}
    monkeypatch.setattr(reports.logger, "info", lambda line, *args: lines.append(line % args))
    config = settings(**{"lookahead": LOOKAHEAD, **config}, usage=True, log_requests=True)
    model = make("qwen3", checkpoints_folder)
    with engine(
        model,
        additional_config=config,
        enable_prefix_caching=False,
        max_model_len=800,
        **options,
    ) as llm:
        cache = llm.scheduler.kv_cache_config
        block_bytes = sum(tensor.size for tensor in cache.kv_cache_tensors) // cache.num_blocks

        def note(pack_request, kept, counts):
            if pack_request.completes_prompt or pack_request.early_target:
                packed[pack_request.request_id] = pack_request, kept.clone()
                held[pack_request.request_id] = None

        llm.compressor.packer.observers.append(note)
        for length in (640, 641, 700):
            prompt = tokens(length, seed=length)
            for index in range(together):
                llm.submit(f"{length}:{index}", prompt, 60, extra_args=extra_args)
            while llm.llm.llm_engine.has_unfinished_requests():
                outputs |= llm.step()
                for request_id in [key for key, blocks in held.items() if blocks is None]:
                    held[request_id] = llm.num_blocks_held(request_id)
        llm.finish_in_flight_steps()
        values = samples(engine="0")
    assert len(packed) == len(outputs) == 3 * together
    usage = {}
    for request_id, (pack_request, kept) in packed.items():
        report = usage[request_id] = outputs[request_id.split("-")[0]].kv_compress
        prompt, lookahead = pack_request.prompt_tokens, report.get("lookahead", 0)
        computed, layer_tokens = prompt + lookahead, report["layer_tokens"]
        assert report["prompt_tokens"] == prompt
        assert report["kept_tokens"] == pytest.approx(sum(layer_tokens) / len(layer_tokens))
        assert report["kept_bytes"] == held[request_id] * block_bytes
        assert report["uncompressed_bytes"] == -(-computed // BLOCK) * block_bytes
        if not pack_request.reads_page_tables and pack_request.plan.kept_after >= lookahead:
            in_pages = ((kept >= 0) & (kept < prompt)).sum((1, 2)) / kept.shape[1]
            unpacked = pack_request.plan.leading_tokens
            unpacked += max(pack_request.plan.tail - lookahead, 0)
            assert (in_pages + unpacked).tolist() == layer_tokens
        assert report.get("protected_tokens", 0) == (87 if extra_args else 0)
    log = "".join(f"INFO 01-02 03:04:05 [reports.py:160] {line}\n" for line in lines)
    by_request = {line.request: line for line in compressed_requests(log)}
    for request_id, report in usage.items():
        line = by_request[request_id]
        assert line.kept_tokens == pytest.approx(report["kept_tokens"], abs=0.05)
        assert list(line.layer_tokens) == report["layer_tokens"]
        assert line.lookahead == report.get("lookahead", 0)
        assert line.blocks_after == held[request_id]
        assert line.blocks_before * block_bytes == report["uncompressed_bytes"]
    reports_ = usage.values()
    kept_tokens = sum(report["kept_tokens"] for report in reports_)
    assert values["prompt_tokens_total",] == sum(report["prompt_tokens"] for report in reports_)
    assert values["kept_tokens_total",] == pytest.approx(kept_tokens)
    ratios = [report["kept_tokens"] / report["prompt_tokens"] for report in reports_]
    assert values["ratio_sum",] == pytest.approx(sum(ratios))
    assert values["ratio_count",] == len(usage)
    for layer in range(3):
        total = sum(report["layer_tokens"][layer] for report in reports_)
        assert values["layer_tokens_total", str(layer)] == total
    if case not in ("pieces", "cut"):  # packed once, from ordinary blocks
        freed = values["freed_blocks_total",] - values["packed_blocks_total",]
        assert freed == sum(line.blocks_before - line.blocks_after for line in by_request.values())
    if case in ("default", "no look-ahead", "short window", "last query", "k4v3", "pieces"):
        plan = PlanOptions(
            model=model, length=700, output=60, compress_config=json.dumps(config["kvcompress"]),
            block_size=BLOCK, dtype="float32", longest=800, requests=8, device="cpu", ranks=1,
        )  # fmt: skip
        forecast = make_plan(plan).forecast
        assert forecast.kept_tokens == pytest.approx(usage[request_id]["kept_tokens"])
        assert forecast.on.decoding == held[request_id]
    if case != "cut":
        assert values["in_place_requests_total",] == (3 if case == "in place" else 0)
    num_cut = sum(values["cut_lookaheads_total", target] for target in (HALF, BUDGET))
    assert (num_cut > 0) == (case == "cut")


def test_refused_requests_are_counted_by_reason(model):
    from vllm.exceptions import VLLMValidationError

    overrides = [
        {"kv_budget": 0.9},
        {"kv_compress": "tova"},
        {"kv_budget": "x"},
        {"kv_budget": 2.0},
    ]
    config = settings("cake", 0.3, allow_override="off", budget_bounds="0.1:0.5")
    with engine(model, additional_config=config) as llm:
        for override in overrides:
            with pytest.raises(VLLMValidationError):
                llm.generate([tokens(300, seed=1)], 4, extra_args=override)
        values = samples()
    refused = {key[1]: n for key, n in values.items() if key[0] == "refused_requests_total"}
    assert refused == {"out_of_bounds": 1, "not_allowed": 1, "invalid": 2, "too_long": 0}


def test_no_metrics_without_compression_and_no_backlog_without_log_stats(model):
    from vllm.v1.metrics.loggers import StatLoggerManager

    with engine(model) as llm:
        llm.generate([tokens(300, seed=1)], 4)
        assert samples() == {}
        assert isinstance(llm.llm.llm_engine.logger_manager, StatLoggerManager)
    config = settings("cake", 0.3)
    with engine(model, additional_config=config, disable_log_stats=True) as llm:
        for seed in range(3):
            llm.generate([tokens(300, seed=seed)], 4)
        assert llm.compressor.compressed == 3
        assert len(llm.scheduler.step_builder.stats.ratios) <= 1
        assert llm.llm.llm_engine.logger_manager is None


def test_vllm_loggers_do_not_see_our_counts(model):
    """Our counts travel in the KV connector's field. vLLM's loggers fail on anything else there."""
    with engine(model, additional_config=settings("cake", 0.3)) as llm:
        manager = llm.llm.llm_engine.logger_manager
        connector_stats = []
        for logger in manager.stat_loggers[1:]:
            record = logger.record

            def recording(stats, *args, record=record, **kwargs):
                connector_stats.append(stats.kv_connector_stats if stats else None)
                record(stats, *args, **kwargs)

            logger.record = recording
        llm.generate([tokens(300, seed=1)], 4)
        assert len(connector_stats) > 2
        assert set(connector_stats) == {None}


def test_connector_stats_stay_for_vllm_loggers():
    from vllm.v1.metrics.stats import SchedulerStats

    from vllm_kvcompress.engine.messages.outputs import attach_counts, take_counts
    from vllm_kvcompress.engine.scheduling.compression_stats import CompressionStats

    compression_stats = CompressionStats()
    compression_stats.planned["cake"] += 1
    counts, connector_stats = compression_stats.take(), {"transfer_duration": [0.5]}
    stats = SchedulerStats(kv_connector_stats=connector_stats)
    attach_counts(stats, counts)
    assert take_counts(stats) == counts
    assert stats.kv_connector_stats == {"transfer_duration": [0.5]}
    assert take_counts(stats) is None
    assert connector_stats == {"transfer_duration": [0.5]}


def test_metrics_have_a_label_for_each_engine(model):
    """With two engines behind a front end, each one's reports are counted under its label."""
    from vllm.v1.metrics.stats import SchedulerStats

    from vllm_kvcompress.engine.frontend.metrics import CompressionStatLogger
    from vllm_kvcompress.engine.messages.outputs import attach_counts
    from vllm_kvcompress.engine.messages.step import PackedPrompt
    from vllm_kvcompress.engine.scheduling.compression_stats import CompressionStats

    with engine(model, additional_config=settings("cake", 0.3)) as llm:
        vllm_config = llm.llm.llm_engine.vllm_config
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    unregister_vllm_metrics()
    config = CompressionConfig.parse(vllm_config.additional_config["kvcompress"])
    logger = CompressionStatLogger(vllm_config, [0, 1], config)
    for index in (1, 0, 1):
        compression_stats = CompressionStats()
        compression_stats.planned["cake"] += 1
        compression_stats.report(
            [
                PackedPrompt(
                    request_id="r",
                    method="cake",
                    tokens=100,
                    layers=(0, 1, 2, 3),
                    layer_tokens=(10, 20, 30, 40),
                    seconds=0.5,
                )
            ]
        )
        stats = SchedulerStats()
        attach_counts(stats, compression_stats.take())
        logger.record(stats, None, engine_idx=index)
        logger.record(None, None, engine_idx=index)
        logger.record(SchedulerStats(), None, engine_idx=index)
        assert stats.kv_connector_stats is None
    assert samples(engine="0")["requests_total", "cake"] == 1
    assert samples(engine="1")["requests_total", "cake"] == 2
    assert samples(engine="1")["layer_tokens_total", "3"] == 80
    assert samples(engine="1")["kept_tokens_total",] == 50
    unregister_vllm_metrics()


@pytest.mark.parametrize(
    ("raw", "labels"),
    [
        ({"compress": "cake"}, ("auto", "")),
        ({"compress": "cake", "packed_dtype": "k4v3"}, ("k4v3", "256")),
        ({"compress": "cake", "alias": "small=cake:0.4:k4v3"}, ("auto", "256")),
        ({"compress": "off", "alias": "small=cake:0.4:k4v3"}, ("k4v3", "256")),
        (
            {"compress": "off", "allow_override": "cake", "packed_dtype": "k4v3"},
            ("k4v3", "256"),
        ),
    ],
    ids=str,
)
def test_the_info_metric_has_the_format_and_the_tokens_of_its_pages(model, raw, labels):
    """A float32 block of 32 tokens holds 256 tokens in k4v3."""
    from prometheus_client import REGISTRY
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    from vllm_kvcompress.engine.frontend.metrics import CompressionStatLogger

    unregister_vllm_metrics()
    vllm_config = configure(model, block_size=BLOCK, dtype="float32")
    CompressionStatLogger(vllm_config, [0], CompressionConfig.parse(raw))
    (info,) = REGISTRY._names_to_collectors["vllm:kv_compress_info"].collect()
    (sample,) = info.samples
    assert (sample.labels["packed_dtype"], sample.labels["packed_page_tokens"]) == labels
    unregister_vllm_metrics()


@pytest.mark.parametrize(
    ("raw", "labels"),
    [
        ({"compress": "off", "allow_override": "all"}, {"lookahead": "", "window": ""}),
        ({"compress": "off", "allow_override": "all", "lookahead": 0}, {"lookahead": "0"}),
        ({"compress": "cake", "allow_override": "all"}, {"lookahead": "0"}),
        ({"compress": "cake-chunk"}, {"lookahead": "32", "decode_interval": ""}),
        ({"compress": "cake-chunk", "budget": 1.0, "packed_dtype": "k4v3"}, {"lookahead": "0"}),
        (
            {"compress": "cake", "packed_dtype": "k4v3", "decode_interval": 200},
            {"decode_interval": "256", "decode_budget": ""},
        ),
        ({"compress": "cake", "decode_budget": 512}, {"decode_interval": "128"}),
        (
            {"compress": "off", "alias": "a=cake:0.4:k4v3", "budget": 0.3},
            {"budget": "0.4", "packed_dtype": "k4v3"},
        ),
        (
            {"compress": "off", "alias": "a=cake:0.4:k4v3", "allow_override": "cake"},
            {"budget": "0.2", "packed_dtype": ""},
        ),
    ],
    ids=str,
)
def test_labels_are_the_settings_that_requests_get(raw, labels):
    found = info_labels(CompressionConfig.parse(raw), BLOCK, 4)
    assert {key: found[key] for key in labels} == labels


@st.composite
def engines(draw):
    """Draw the settings of an engine that compresses something; None if they are refused."""
    methods, formats = st.sampled_from(sorted(PRESETS)), st.sampled_from(["auto", "k4v3"])
    budgets = st.sampled_from([0.2, 0.6, 1.0, 256, 1])
    meanings = st.tuples(methods, budgets) | st.tuples(methods, budgets, formats)
    aliases = st.dictionaries(st.sampled_from("ab"), meanings, min_size=1, max_size=2)
    raw = draw(
        st.fixed_dictionaries(
            {"compress": methods | st.just("off"), "budget": budgets},
            optional={
                "packed_dtype": formats,
                "lookahead": st.sampled_from([0, 16, 48]),
                "window": st.sampled_from([0, 8, 64]),
                "decode_interval": st.sampled_from([BLOCK, 96, 160, 512, 1024]),
                "decode_budget": st.sampled_from([160, 512]),
                "max_whole": st.sampled_from([1024, 2048]),
                "allow_override": st.lists(methods, min_size=1, max_size=3),
                "alias": aliases.map(
                    lambda each: {name: ":".join(map(str, parts)) for name, parts in each.items()}
                ),
            },
        )
    )
    try:
        settings_ = CompressionConfig.parse(raw)
    except ConfigError:
        return None
    return settings_ if settings_.active else None


def behaviour(config, itemsize=2, length=3000):
    """Return what the schedules of a prompt do with the settings of one request, by label."""
    page_tokens = packed_page_tokens(config, BLOCK, itemsize)
    pieces = piece_schedule(config, LAYERS, BLOCK, length, (), page_tokens)
    plan = config.page_plan(LAYERS, length, BLOCK, (), page_tokens)
    prefill = pieces or (plan and PromptSchedule(settings=config, page_plan=plan))
    limits = {"prefilled": length, "max_tokens": length + 3000}
    output = None
    if config.decode.budget is not None:
        output = OutputSchedule(settings=config, **limits)
    elif page_tokens and config.packs_outputs:
        output = OutputGroupSchedule(
            settings=config, max_tokens=limits["max_tokens"], page_tokens=page_tokens
        )
    packed_at = []
    if output is not None:
        footprint = KVFootprint(num_layers=LAYERS, block_size=BLOCK)
        if plan is not None:
            footprint.pack(plan, length // BLOCK)
        for tokens_ in range(length - length % BLOCK + BLOCK, limits["max_tokens"], BLOCK):
            if (repacked := output.plan(footprint, tokens_)) is not None:
                packed_at.append(tokens_)
                footprint.pack(repacked, repacked.packed_end // BLOCK, freeze=True)
    steps = {later - earlier for earlier, later in itertools.pairwise(packed_at)}
    # A budget of 1.0 in 16 bits compresses no prompt.
    lookahead = config.resolved_lookahead if prefill is None else lookahead_tokens_of(prefill)
    return {
        "lookahead": str(lookahead),
        "decode_interval": str(steps.pop()) if len(steps) == 1 else str(sorted(steps) or ""),
        "window": str(config.resolved_window),
        "packed_dtype": "auto" if page_tokens is None else "k4v3",
        "budget": str(config.budget),
    }


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(engines())
def test_labels_agree_with_the_schedules_of_all_requests(config):
    if config is None:
        return
    labels = info_labels(config, BLOCK, 2)
    rounded = config.in_whole_blocks(BLOCK)
    if rounded.enabled:
        expected = behaviour(rounded)
        assert {key: labels[key] for key in expected} == expected
        return
    asks = [{"kv_compress": name} for name in rounded.allow_override]
    asks += [{"kv_alias": alias.name} for alias in rounded.alias]
    all_behaviours = [behaviour(RequestOptions.parse(rounded, ask).settings) for ask in asks]
    flags = {"budget": config.budget, "lookahead": config.lookahead.tokens}
    flags["packed_dtype"] = config.packed.dtype
    for key in all_behaviours[0]:
        found = {each[key] for each in all_behaviours}
        if key == "decode_interval":
            found -= {""}
        # requests that differ leave a label to the flag
        allowed = found if len(found) == 1 else {"", str(flags.get(key, ""))}
        assert labels[key] in (allowed or {""}), key


def test_every_metric_is_documented():
    from conftest import ROOT
    from vllm_kvcompress.engine.frontend.metrics import COUNTERS

    text = (ROOT / "docs" / "operate.md").read_text()
    for name, (label, _) in COUNTERS.items():
        assert f"`vllm:kv_compress_{name}_total`" in text, name
        assert not label or f"`{label}`" in text
    for name in ("info", "off", "budget", "ratio", "seconds", "refused_requests_total"):
        assert f"`vllm:kv_compress_{name}`" in text, name
