"""``kvcompress plan``: its figures are the engine's, and what cannot be served is said."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from broken_sites import WITHOUT_VLLM
from checkpoints import tokens
from engines import BLOCK, engine, settings
from processor import needs_avx512
from vllm_kvcompress.commands.gpu_memory import defaults_for
from vllm_kvcompress.commands.model_shape import read_config, shape_of
from vllm_kvcompress.commands.plan import ask
from vllm_kvcompress.commands.plan_options import PlanOptions
from vllm_kvcompress.engine.messages.settings import active_settings
from vllm_kvcompress.engine.worker.footprint import device_bytes
from vllm_kvcompress.planning.model_traits import traits_of

HERE = ["--block-size", BLOCK, "--dtype", "float32", "--device", "cpu"]


def planned(model: str, length: int, output: int, given: dict, **more):
    options = dict(memory_gib=None, dtype="float32", ranks=1, longest=None, requests=256)
    options |= {"block_size": BLOCK, "device": "cpu", **more}
    found = ask(
        PlanOptions(
            model=model, everything=json.dumps(given), length=length, output=output, **options
        )
    )
    return found.forecast


@pytest.fixture(scope="module")
def llm(tiny):
    config = settings("cake", 0.2, allow_override="all")
    with engine(tiny, additional_config=config, max_model_len=2048, max_num_seqs=64) as running:
        yield running


def held_by(llm, prompt: list[int], output: int, **asked) -> list[int]:
    """Blocks out of the pool each time a step was scheduled after the prefill's."""
    schedule, seen = llm.scheduler.schedule, []
    free = llm.free_blocks

    def scheduling(*args, **kwargs):
        result = schedule(*args, **kwargs)
        if result.num_scheduled_tokens:
            seen.append(free - llm.free_blocks)
        return result

    llm.scheduler.schedule = scheduling
    try:
        llm.generate([prompt], output, extra_args=asked)
    finally:
        llm.scheduler.schedule = schedule
    assert llm.free_blocks == free
    return seen


@pytest.mark.engine
@pytest.mark.parametrize("output", [2, 70])
@pytest.mark.parametrize(
    ("length", "method", "budget"),
    [
        (1000, "cake", 0.2),
        (1024, "snapkv", 0.1),
        (1025, "streamingllm", 0.05),
        (513, "tova", 200),
        (500, "d2o", 0.5),
        (200, "cake", 1.0),  # left whole
        (100, "cake", 0.2),  # too short
    ],
)
def test_its_blocks_are_those_the_engine_holds(llm, tiny, length, method, budget, output):
    found = planned(tiny, length, output, {"compress": method, "budget": budget, "min_prompt": 128})
    seen = held_by(llm, tokens(length, seed=1), output, kv_compress=method, kv_budget=budget)
    assert len(seen) == output
    assert seen[0] == found.on.decoding
    assert seen[-1] == found.on.end
    seen = held_by(llm, tokens(length, seed=1), output, kv_compress="off")
    assert seen[0] == found.off.prefill == found.off.decoding == found.on.prefill
    assert seen[-1] == found.off.end


@pytest.mark.engine
def test_an_answer_that_is_bounded_holds_at_most_what_it_says(tiny):
    """Of a short prompt, and of one that was compressed; the ring of queries is counted too."""
    own = settings("cake", 0.2, decode_budget=96, decode_interval=64)
    with engine(tiny, additional_config=own, max_model_len=2048, max_num_seqs=64) as llm:
        for length, output in ((45, 300), (700, 250)):
            found = planned(tiny, length, output, own["kvcompress"], longest=2048, requests=64)
            seen = held_by(llm, tokens(length, seed=1), output)
            assert (seen[0], max(seen)) == (found.on.decoding, found.on.end)
            assert max(seen) < found.off.end
        compression = active_settings(llm.worker.vllm_config.additional_config)
        assert found.extra_bytes == device_bytes(llm.worker.vllm_config, compression)
        ring = llm.compressor.pool.ring
    without = planned(
        tiny, 700, 250, settings("cake", 0.2)["kvcompress"], longest=2048, requests=64
    )
    assert found.extra_bytes - without.extra_bytes >= ring._queries.nbytes


@pytest.mark.engine
def test_its_bytes_are_those_the_engine_takes(llm, tiny):
    found = planned(tiny, 1000, 24, settings("cake", 0.2, allow_override="all")["kvcompress"],
                    longest=2048, requests=64)  # fmt: skip
    config = llm.worker.vllm_config
    cache = llm.scheduler.kv_cache_config
    taken = sum(tensor.size for tensor in cache.kv_cache_tensors)
    assert found.block_bytes * cache.num_blocks == taken
    compression = active_settings(config.additional_config)
    assert found.extra_bytes == device_bytes(config, compression)
    assert 0 < found.table_bytes < found.extra_bytes


@needs_avx512
@pytest.mark.engine
def test_the_bytes_of_a_quantised_cache_too(tiny):
    given = settings("cake", 0.2, decode_budget=96)
    options = dict(max_model_len=2048, max_num_seqs=64, kv_cache_dtype="fp8")
    with engine(tiny, additional_config=given, **options) as llm:
        cache, config = llm.scheduler.kv_cache_config, llm.worker.vllm_config
        taken = sum(tensor.size for tensor in cache.kv_cache_tensors)
        compression = active_settings(config.additional_config)
        extra = device_bytes(config, compression)
    more = dict(longest=2048, requests=64)
    found = planned(tiny, 1000, 24, given["kvcompress"], cache_dtype="fp8", **more)
    assert found.block_bytes * cache.num_blocks == taken
    assert found.extra_bytes == extra
    plain = planned(tiny, 1000, 24, given["kvcompress"], **more)
    assert plain.block_bytes == 4 * found.block_bytes
    assert plain.on.prefill == found.on.prefill


@pytest.mark.engine
def test_as_many_requests_fit_as_it_says(tiny):
    """All of them at once, none of them preempted, in a pool of the size that was planned for."""
    given, length, output = settings(budget=0.2)["kvcompress"], 640, 40
    memory = 100 * planned(tiny, length, output, given).block_bytes / 2**30
    found = planned(tiny, length, output, given, memory_gib=memory)
    assert found.pool_on.blocks == 99
    count = found.pool_on.beside_prefill
    assert count > 2 * found.pool_off.decoding
    with engine(
        tiny,
        additional_config=settings(budget=0.2),
        blocks=100,
        max_model_len=length + output,
        max_num_seqs=64,
        max_num_batched_tokens=length,
        enable_prefix_caching=False,
    ) as llm:
        preemptions = llm.watch_preemptions()
        for i in range(count):
            llm.submit(str(i), tokens(length, seed=i), output)
        most, done = 0, {}
        while llm.llm.llm_engine.has_unfinished_requests():
            done.update(llm.step())
            most = max(most, len(llm.running()))
        assert most == count == len(done)
        assert not preemptions


def test_the_command_prints_the_same_without_vllm(run, tiny):
    flags = ["--len", 1000, "--max-tokens", 70, "--kv-budget", 0.1, "--kv-min-prompt", 500, *HERE]
    flags += ["--kv-memory", 0.01, "--kv-compress", "snapkv"]
    done = run("plan", tiny, *flags, "--json", site=WITHOUT_VLLM)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    given = {"compress": "snapkv", "budget": 0.1, "min_prompt": 500}
    expected = planned(tiny, 1000, 70, given, memory_gib=0.01)
    assert found["request_on"]["end_blocks"] == expected.on.end
    assert found["request_on"]["end_bytes"] == expected.on.end * expected.block_bytes
    assert found["pool_on"]["decoding"] == expected.pool_on.decoding
    assert found["settings"] == {"compress": "snapkv", "budget": 0.1, "min_prompt": 500}
    text = run("plan", tiny, *flags, site=WITHOUT_VLLM)
    assert text.returncode == 0
    row = next(line for line in text.stdout.splitlines() if "all decoding" in line)
    cells = [cell.strip() for cell in row.split("│")]
    assert cells[2:4] == [str(expected.pool_off.decoding), str(expected.pool_on.decoding)]
    assert "must fit" not in text.stdout


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["nowhere/a/model", "--len", 10], "there is no folder nowhere/a/model"),
        (["owner/model", "--len", 10], "no config.json of that name on the hub or in its cache"),
        (["TINY", "--len", 2000, "--kv-compress", "caek"], "did you mean 'cake'"),
        (["TINY", "--len", 2000, "--kv-compress", "off"], "give a method"),
        (["TINY", "--len", 2000, "--kv-budget", "1.5"], "budget must be a ratio in (0, 1]"),
        (["TINY", "--len", 2000, "--kv-memory", "0.0001"], "must fit once"),
        (["TINY", "--len", 2000, "--tp", 3], "--tp must divide the model's 4 heads"),
        (["TINY", "--len", 2000, "--dtype", "fp8"], "--dtype must be auto or one of"),
        (["TINY", "--len", 2000, "--mamba-ssm-cache-dtype", "fp8"], "dtype must be auto or one of"),
        (["TINY", "--len", 2000, "--kv-cache-dtype", "nvfp4"], "set --kv-cache-dtype auto"),
        *(
            (
                [
                    "TINY",
                    "--len",
                    2000,
                    "--kv-cache-dtype",
                    "fp8",
                    "--kv-compress",
                    "d2o",
                    "--dtype",
                    dtype,
                ],
                "merges tokens, which a KV cache in fp8 would have to quantise anew; choose a"
                " method that does not merge, or set --kv-cache-dtype auto",
            )
            for dtype in ("bfloat16", "float32")  # which --kv-cache-dtype cannot name
        ),
        (["TINY", "--len", 2000, "--gpu-memory", "1"], "leaves nothing for the KV cache; raise"),
        (["TINY", "--len", 2000, "--gpu-memory", "80", "--device", "cpu"], "give --kv-memory"),
        (["TINY", "--len", 9, "--gpu-memory-utilization", "1.5"], "must be in (0, 1], got 1.5"),
        (["TINY", "--len", 2000, "--kv-budget-bounds", "0.1:0.5"], "--kv-allow-override all"),
        (["TINY", "--len", 2000, "--kv-allow-override", "caek"], "did you mean 'cake'"),
        (["TINY", "--len", 2000, "--max-model-len", 100], "--max-model-len must hold"),
        (["TINY", "--len", 2000, "--kv-compress-config", "{"], "must be a JSON object"),
        (
            ["TINY", "--len", 2000, "--kv-compress", "dynamickv", "--kv-decode-budget", 64],
            "--kv-decode-budget cannot bound answers by 'dynamickv'",
        ),
        (
            [
                "TINY",
                "--len",
                2000,
                "--kv-decode-budget",
                64,
                "--block-size",
                48,
                "--kv-compress-config",
                '{"decode_interval": 128}',
            ],
            "has 48 tokens here, got 128; set it to 96",
        ),
    ],
)
def test_a_wrong_flag_is_one_sentence_and_status_2(typed, tiny, flags, sentence):
    done = typed("plan", *[tiny if flag == "TINY" else flag for flag in flags])
    assert done.status == 2
    assert done.out == ""
    (line,) = done.err.splitlines()
    assert line.startswith("kvcompress: error: ")
    assert sentence in line


def test_two_ranks_halve_a_block_until_each_has_one_head(tiny):
    given = settings()["kvcompress"]
    one, two, four = (planned(tiny, 1000, 8, given, ranks=n).block_bytes for n in (1, 2, 4))
    assert one == 2 * two
    assert four == two  # two KV heads are repeated on four ranks


def test_a_hub_name_is_read_from_the_cache(tiny, run, tmp_path):
    home = tmp_path / "hub"
    snapshot = home / "models--owner--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (home / "models--owner--tiny" / "refs").mkdir()
    (home / "models--owner--tiny" / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text(Path(tiny, "config.json").read_text())
    environment = {"HF_HUB_CACHE": str(home), "HF_HUB_OFFLINE": "1"}
    done = run("plan", "owner/tiny", "--len", 2000, "--json", environment=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["shape"]["layers"] == 4


# -- what vLLM takes by itself ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "gib", "ranks"),
    [*(("cuda", gib, 1) for gib in (24, 69.9, 70, 80, 141, 159.9, 160, 180)), ("cpu", 64, 2)],
)
def test_the_defaults_are_the_servers(device, gib, ranks, monkeypatch):
    """`EngineArgs.get_batch_defaults`, asked on a platform with that much memory."""
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    platform = SimpleNamespace(
        get_device_total_memory=lambda: int(gib * 2**30),
        get_device_name=lambda: "NVIDIA H100",
        is_tpu=lambda: False,
        is_cpu=lambda: device == "cpu",
        is_device_capability=lambda capability: capability == (9, 0),
    )
    monkeypatch.setattr(arg_utils, "current_platform", platform)
    tokens_, requests = arg_utils.EngineArgs.get_batch_defaults(ranks)
    server = UsageContext.OPENAI_API_SERVER
    found = defaults_for(device, gib, ranks)
    assert (found.batched_tokens, found.max_num_seqs) == (tokens_[server], requests[server])


def test_no_more_requests_at_once_than_the_scheduler_runs(tiny, typed):
    given = settings(budget=0.1)["kvcompress"]
    few = planned(tiny, 1000, 8, given, memory_gib=1, requests=4)
    assert (few.pool_off.decoding, few.pool_on.decoding, few.pool_on.beside_prefill) == (4, 4, 4)
    default = planned(tiny, 1000, 8, given, memory_gib=1, requests=None)
    assert default.pool_on.decoding == default.pool_on.most == 128  # a server's on a CPU
    said = typed("plan", tiny, "--len", 1000, "--kv-memory", 1, "--max-num-seqs", 4, *HERE).out
    assert "More would fit; 4 is --max-num-seqs." in " ".join(said.split())


def test_the_worst_that_requests_may_ask_for(tiny):
    """Of the methods and the budgets that the server would allow, through the server's check."""

    def worst(method: str, budget: float, **more):
        given = {"compress": method, "budget": budget, "min_prompt": 128, **more}
        return planned(tiny, 1000, 8, given, memory_gib=0.1, requests=1024)

    bounded = worst("cake", 0.1, allow_override="cake,snapkv", budget_bounds="0.05:0.5,64:128")
    assert bounded.worst.blocks == worst("cake", 0.5).on
    assert bounded.worst.asks in ("cake at 0.5", "snapkv at 0.5")
    assert bounded.pool_on.decoding > bounded.worst.pool.decoding > bounded.pool_off.decoding
    unbounded = worst("cake", 0.1, allow_override="cake")
    assert (unbounded.worst.asks, unbounded.worst.blocks) == ("cake at 1.0", unbounded.off)
    left = worst("cake", 0.1, allow_override="off,cake", budget_bounds="0.05:0.5")
    assert (left.worst.asks, left.worst.blocks) == ("off", left.off)
    asked = worst("off", 0.1, allow_override="tova", budget_bounds="0.05:0.5")
    assert asked.on == asked.off
    assert "ask for it" in asked.left_whole
    assert worst("cake", 0.1).worst is None


def test_the_worst_that_a_name_of_the_model_may_ask_for(tiny):
    def worst(method: str, alias: dict, **more):
        given = {"compress": method, "budget": 0.1, "min_prompt": 128, "alias": alias, **more}
        return planned(tiny, 1000, 8, given).worst

    def whole(method: str, budget: float):
        return planned(tiny, 1000, 8, settings(method, budget, min_prompt=128)["kvcompress"]).on

    named = worst("cake", {"tiny@half": "snapkv:0.5", "tiny@less": "cake:0.05"})
    assert (named.asks, named.blocks) == ("the name tiny@half", whole("snapkv", 0.5))
    less = worst("cake", {"tiny@less": "cake:0.05"})
    assert (less.asks, less.blocks) == ("cake at 0.1", whole("cake", 0.1))
    left = worst("cake", {"tiny@full": "off", "tiny@half": "cake:0.5"})
    assert left.asks == "the name tiny@full"
    assert worst("off", {"tiny@half": "cake:0.5"}).asks == "off"
    # an alias is not bound by what bounds requests, and lends its budget to what they ask for
    both = worst(
        "cake", {"tiny@more": "cake:0.8"}, allow_override="snapkv", budget_bounds="0.05:0.3"
    )
    assert both.blocks == whole("cake", 0.8)


def test_names_are_parsed_as_the_server_does(typed, tiny):
    flags = ["--kv-alias", "tiny@half=snapkv:0.5", "--kv-alias", "tiny@less=cake:0.1"]
    found = json.loads(typed("plan", tiny, "--len", 2000, *flags, *HERE, "--json").out)
    assert found["settings"]["alias"] == {"tiny@half": "snapkv:0.5", "tiny@less": "cake:0.1"}
    assert found["worst"]["asks"] == "the name tiny@half"
    assert found["worst"]["request"]["end_blocks"] > found["request_on"]["end_blocks"]
    wrong = typed("plan", tiny, "--len", 2000, "--kv-alias", "tiny@half=caek:0.5", *HERE)
    assert wrong.status == 2
    assert "did you mean 'cake'" in wrong.err


def test_overrides_are_parsed_as_the_server_does(typed, tiny):
    flags = ["--kv-allow-override", "cake,snapkv", "--kv-budget-bounds", "0.05:0.5"]
    done = typed("plan", tiny, "--len", 2000, *flags, *HERE)
    assert done.status == 0
    assert "The most that a request may ask for (" in done.out
    found = json.loads(typed("plan", tiny, "--len", 2000, *flags, *HERE, "--json").out)
    assert found["settings"]["allow_override"] == ["cake", "snapkv"]
    assert found["worst"]["request"]["end_blocks"] > found["request_on"]["end_blocks"]
    assert found["worst"]["pool"] is None


# -- models that cannot be served (all: tests/engine/test_refused_models.py) ---------------------

MLA = dict(architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", kv_lora_rank=64,
           q_lora_rank=None, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)  # fmt: skip


def test_a_refused_model_is_status_2(typed, tiny, tmp_path):
    config = {**json.loads(Path(tiny, "config.json").read_text()), **MLA}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = typed("plan", tmp_path, "--len", 2000)
    assert done.status == 2
    assert "MLA models keep one latent per token" in done.err
    assert "without --kv-compress" in done.err


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (dict(model_type="qwen2", sliding_window=4096), None),  # off unless it is switched on
        (dict(model_type="qwen2", sliding_window=4096, use_sliding_window=False), None),
        (dict(model_type="qwen2", sliding_window=4096, use_sliding_window=True), 4096),
        (dict(model_type="mistral", sliding_window=None), None),
        (dict(model_type="mistral", sliding_window=0), None),
    ],
)
def test_a_window_counts_where_it_is_switched_on(config, window):
    assert traits_of(config).window == window


def test_the_demo_models_shape(demo_model):
    shape = shape_of(read_config(demo_model))
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (30, 9, 3, 64)
    assert (shape.dtype, shape.longest) == ("bfloat16", 8192)
