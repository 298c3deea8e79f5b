"""What /metrics says of compression is what happened: counted once, by engine, and cheap."""

import random

import pytest

from checkpoints import make, tokens
from engines import BLOCK, engine, first_runner, settings
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.settings.config import CompressionConfig

LAYERS = 4


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make("llama-gqa", checkpoints_folder)


def samples(**labels):
    """Every sample of ours with these labels, by its name and further labels."""
    from prometheus_client import REGISTRY

    found = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            name = sample.name.removeprefix("vllm:kv_compress_")
            if name == sample.name or name.endswith("_created"):
                continue
            if labels.items() <= sample.labels.items():
                rest = set(sample.labels) - {"model_name", "engine", *labels}
                found[name, *(sample.labels[key] for key in sorted(rest))] = sample.value
    return found


def plan_of(length, budget=0.3, compress="cake"):
    config = CompressionConfig.parse({"compress": compress, "budget": budget, "min_prompt": 128})
    return page_plan(config.prompt(LAYERS, length), BLOCK)


def test_the_figures_are_the_plans(model):
    lengths = [130, 400, 401, 500, 512]
    with engine(model, additional_config=settings("pyramidkv", 0.3)) as llm:
        assert samples()["planned_requests_total", "pyramidkv"] == 0
        assert samples()["skipped_requests_total", "low_pressure"] == 0
        assert samples()["layer_tokens_total", str(LAYERS - 1)] == 0
        for length in lengths:  # one at a time: a shared prompt's blocks would not come back
            llm.generate([tokens(length, seed=length)], 6)
        llm.generate([tokens(50, seed=1)], 6)
        llm.settle()
        seen = samples(engine="0")
    plans = [plan_of(length, compress="pyramidkv") for length in lengths]
    kept = sum(plan.pages * BLOCK / LAYERS + plan.tail for plan in plans)
    assert (
        seen["requests_total", "pyramidkv"]
        == seen["planned_requests_total", "pyramidkv"]
        == len(lengths)
    )
    assert seen["skipped_requests_total", "short_prompt"] == 1
    assert seen["prompt_tokens_total",] == sum(lengths)
    assert seen["kept_tokens_total",] == pytest.approx(kept)
    assert seen["freed_blocks_total",] == sum(plan.full_blocks for plan in plans)
    assert seen["packed_blocks_total",] == sum(plan.blocks for plan in plans)
    assert seen["in_place_requests_total",] == 0
    layers = [seen["layer_tokens_total", str(layer)] for layer in range(LAYERS)]
    assert sum(layers) == pytest.approx(kept * LAYERS)
    assert len(set(layers)) > 1
    assert seen["ratio_count",] == seen["seconds_count",] == len(lengths)
    assert 0 < seen["ratio_sum",] < len(lengths)
    assert 0 < seen["seconds_sum",] < 60
    assert seen["budget", "ratio"] == 0.3
    assert sum(name == "info" for name, *_ in seen) == 1


@first_runner
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_request_is_counted_once(model, asynchronous, keep_async_scheduling):
    """Aborts, preemptions and overrides included: planned or skipped, and what is planned is done
    unless it was aborted in between. Each answer says what was last packed for it."""
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
        preempted = llm.watch_preemptions()
        ids, answers = {}, {}

        def note(finished, pages):
            ids[finished.todo.request_id] = finished.todo, pages.tolist()

        llm.watch_packing(lambda finished: finished, note)
        for index in range(40):
            ask = rng.choice([None, {"kv_compress": "off"}, {"kv_compress": "snapkv"}])
            prompt = tokens(rng.randint(20, 700), seed=index)
            llm.submit(str(index), prompt, rng.randint(2, 60), extra_args=ask)
            answers |= llm.step()
            if index % 9 == 8:
                llm.llm.llm_engine.abort_request([str(index)])
        while llm.llm.llm_engine.has_unfinished_requests():
            answers |= llm.step()
        llm.settle()
        assert len(llm.scheduler.usage_notes) == 0
        packed = llm.compressor.compressed
        admitted = len(llm.manager.planner.admissions._decisions)
        seen = samples()
    skipped = {k[1]: v for k, v in seen.items() if k[0] == "skipped_requests_total"}
    planned = sum(v for k, v in seen.items() if k[0] == "planned_requests_total")
    done = sum(v for k, v in seen.items() if k[0] == "requests_total")
    again = sum(len(cuts) for cuts in preempted.values())
    assert admitted <= 1  # requests that ended are forgotten
    assert done == planned == packed
    assert packed - len(ids) <= again  # compressed again after a preemption, nobody else twice
    last = {request_id.split("-")[0]: what for request_id, what in ids.items()}
    assert {name for name, answer in answers.items() if hasattr(answer, "kv_compress")} == {
        name for name in last if name in answers
    }
    for name in last.keys() & answers.keys():
        (todo, pages), plan = last[name], last[name][0].plan
        layers = [count * BLOCK + plan.tail for count in pages]
        assert answers[name].kv_compress == {
            "method": todo.settings.compress,
            "budget": 0.3,
            "prompt_tokens": plan.tokens,
            "kept_tokens": sum(layers) / LAYERS,
            "layer_tokens": layers,
        }
        assert answers[name].kv_transfer_params is None
    assert len(last.keys() & answers.keys()) > 10
    # four were aborted, before they were admitted, in the prefill or later
    assert 36 <= sum(skipped.values()) + len(ids) <= 40
    assert {name for name, count in skipped.items() if count} >= {"off", "short_prompt"}


@first_runner
def test_a_pool_without_free_blocks_is_told(model):
    length = 640
    blocks = -(-(length + 24) // BLOCK)
    with engine(
        model,
        additional_config=settings("cake", 0.5),
        blocks=1 + blocks,
        max_model_len=length + 24,
        enable_prefix_caching=False,
    ) as llm:
        llm.generate([tokens(length, seed=5)], 20)
        llm.settle()
    assert samples()["in_place_requests_total",] == 1


@first_runner
def test_refusals_are_counted_where_requests_enter(model):
    from vllm.exceptions import VLLMValidationError

    asks = [{"kv_budget": 0.9}, {"kv_compress": "tova"}, {"kv_budget": "x"}, {"kv_budget": 2.0}]
    bounds = settings("cake", 0.3, allow_override="off", budget_bounds="0.1:0.5")
    with engine(model, additional_config=bounds) as llm:
        for ask in asks:
            with pytest.raises(VLLMValidationError):
                llm.generate([tokens(300, seed=1)], 4, extra_args=ask)
        seen = samples()
    refused = {key[1]: n for key, n in seen.items() if key[0] == "refused_requests_total"}
    assert refused == {"out_of_bounds": 1, "not_allowed": 1, "invalid": 2, "too_long": 0}


@first_runner
def test_off_there_are_none_and_without_statistics_nothing_piles_up(model):
    from vllm.v1.metrics.loggers import StatLoggerManager

    with engine(model) as llm:
        llm.generate([tokens(300, seed=1)], 4)
        assert samples() == {}
        assert isinstance(llm.llm.llm_engine.logger_manager, StatLoggerManager)
    quiet = settings("cake", 0.3)
    with engine(model, additional_config=quiet, disable_log_stats=True) as llm:
        for seed in range(3):
            llm.generate([tokens(300, seed=seed)], 4)
        assert llm.compressor.compressed == 3
        assert len(llm.manager.tally.packed) <= 1
        assert llm.llm.llm_engine.logger_manager is None


@first_runner
def test_vllms_own_loggers_never_see_what_ours_takes(model):
    """Where a KV connector's figures would be: its loggers fail on anything else."""
    with engine(model, additional_config=settings("cake", 0.3)) as llm:
        manager = llm.llm.llm_engine.logger_manager
        seen = []
        for logger in manager.stat_loggers[1:]:
            record = logger.record

            def recording(stats, *args, record=record, **kwargs):
                seen.append(stats.kv_connector_stats if stats else None)
                record(stats, *args, **kwargs)

            logger.record = recording
        llm.generate([tokens(300, seed=1)], 4)
        assert len(seen) > 2
        assert set(seen) == {None}


@first_runner
def test_a_connectors_own_figures_stay_for_vllms_loggers():
    from vllm.v1.metrics.stats import SchedulerStats

    from vllm_kvcompress.engine.messages.counts import attach_counts, take_counts
    from vllm_kvcompress.engine.scheduling.tally import Tally

    tally = Tally()
    tally.planned["cake"] += 1
    counts, own = tally.take(), {"transfer_duration": [0.5]}
    stats = SchedulerStats(kv_connector_stats=own)
    attach_counts(stats, counts)
    assert take_counts(stats) == counts
    assert stats.kv_connector_stats == {"transfer_duration": [0.5]}
    assert take_counts(stats) is None
    assert own == {"transfer_duration": [0.5]}


@first_runner
def test_each_engine_has_its_label(model):
    """A front end of two engines: what the second one reports is the second one's."""
    from vllm.v1.metrics.stats import SchedulerStats

    from vllm_kvcompress.engine.frontend.metrics import CompressionStatLogger
    from vllm_kvcompress.engine.messages.counts import attach_counts
    from vllm_kvcompress.engine.messages.step import Packed
    from vllm_kvcompress.engine.scheduling.tally import Tally

    with engine(model, additional_config=settings("cake", 0.3)) as llm:
        config = llm.llm.llm_engine.vllm_config
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    unregister_vllm_metrics()
    own = CompressionConfig.parse(config.additional_config["kvcompress"])
    logger = CompressionStatLogger(config, [0, 1], own)
    for index in (1, 0, 1):
        tally = Tally()
        tally.planned["cake"] += 1
        tally.report(
            [
                Packed(
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
        attach_counts(stats, tally.take())
        logger.record(stats, None, engine_idx=index)
        logger.record(None, None, engine_idx=index)
        logger.record(SchedulerStats(), None, engine_idx=index)
        assert stats.kv_connector_stats is None
    assert samples(engine="0")["requests_total", "cake"] == 1
    assert samples(engine="1")["requests_total", "cake"] == 2
    assert samples(engine="1")["layer_tokens_total", "3"] == 80
    assert samples(engine="1")["kept_tokens_total",] == 50
    unregister_vllm_metrics()


def test_every_metric_is_documented():
    from conftest import ROOT
    from vllm_kvcompress.engine.frontend.metrics import COUNTERS

    text = (ROOT / "docs" / "operate.md").read_text()
    for name, (label, _, _) in COUNTERS.items():
        assert f"`vllm:kv_compress_{name}_total`" in text, name
        assert not label or f"`{label}`" in text
    for name in ("info", "budget", "ratio", "seconds", "refused_requests_total"):
        assert f"`vllm:kv_compress_{name}`" in text, name
