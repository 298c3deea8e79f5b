"""KV connectors: a pulling decode server and offloading are configured, other uses are refused."""

from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from checkpoints import HYBRIDS, make
from configuring import configure
from engines import settings
from test_command_line import engine_args
from vision_checkpoints import make as make_vision
from vision_checkpoints import without_videos
from vllm_kvcompress.engine.frontend.transfers import Pulls, prompts_of
from vllm_kvcompress.engine.scheduling.offloading import (
    OffloadingConnector,
    SimpleCPUOffloadConnector,
)
from vllm_kvcompress.engine.startup import configure as configure_module
from vllm_kvcompress.errors import ConfigError, OverrideError, VllmHookError

AHEAD = {"lookahead": 8}
NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"


def transfer(**changes):
    defaults = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "kv_buffer_device": "cpu",
    }
    return {"kv_transfer_config": defaults | changes}


def settings_with(compress="cake-chunk", **changes):
    return {"additional_config": settings(compress, 0.3, **AHEAD | changes)}


@pytest.mark.parametrize("name", ["NixlConnector", "NixlPullConnector"])
def test_a_pulling_decode_server_is_configured(model, name):
    config = configure(model, **transfer(kv_connector=name) | settings_with())
    assert config.scheduler_config.scheduler_cls.endswith("CompressingScheduler")


def offloading(role="kv_both", connector="OffloadingConnector", **keys):
    options = {"kv_connector": connector, "kv_role": role}
    return transfer(**options, kv_connector_extra_config={"cpu_bytes_to_use": 2**30, **keys})


def simple(role="kv_both", **keys):
    return offloading(role, "SimpleCPUOffloadConnector", **keys)


@pytest.mark.parametrize(
    ("options", "reason", "fix"),
    [
        (
            transfer(kv_role="kv_producer"),
            "reads the blocks of a prompt by position",
            "kv_consumer",
        ),
        (transfer(kv_role="kv_both"), "reads the blocks of a prompt by position", "got 'kv_both'"),
        (
            transfer(kv_connector="NixlPushConnector"),
            "push blocks into waiting prompts",
            "NixlConn",
        ),
        (transfer(kv_connector="MultiConnector"), "by their position or hash", "NixlConnector"),
        (transfer(kv_connector="LMCacheConnectorV1"), "by their position or hash", "remove"),
        (simple(), "without lazy_offload", 'set "lazy_offload": true'),
        (simple(lazy_offload=False), "it would store nothing", "or use OffloadingConnector"),
        (
            simple(lazy_offload=True) | {"enable_prefix_caching": False},
            "stores only blocks of the prefix cache",
            "remove --no-enable-prefix-caching, or use OffloadingConnector",
        ),
        (
            simple(lazy_offload=True, kv_offload_backend="disk"),
            "at most the keys ['cpu_bytes_to_use', 'lazy_offload']",
            "remove kv_offload_backend 'disk'",
        ),
        (
            simple("kv_producer", lazy_offload=True),
            "SimpleCPUOffloadConnector is only tested as kv_both",
            "set kv_role to 'kv_both'",
        ),
        (
            simple(lazy_offload=True) | settings_with(max_whole=512, piece=128),
            "later pieces of a prompt",
            "remove --kv-max-whole, got 512",
        ),
        (
            transfer(kv_connector_module_path=NIXL),
            "of the KV connectors only",
            f"(or --kv-offloading-backend), got {NIXL!r}",
        ),
        (
            transfer(kv_connector_extra_config={"bidirectional_kv_xfer": True}),
            "reads the blocks of a prompt by position",
            "remove bidirectional_kv_xfer",
        ),
        (transfer(enable_permute_local_kv=True), "not tested together", ".enable_permute_local_kv"),
        (transfer(kv_buffer_device="cuda"), "not tested together", "config.kv_buffer_device"),
        (
            transfer() | settings_with(lookahead=0),
            "so it has no observation window",
            "--kv-lookahead",
        ),
        (
            transfer() | settings_with(allow_override="off,h2o"),
            "a decode server computes only the last tokens",
            "got ['h2o']",
        ),
        (
            transfer() | settings_with(alias={"keys": "keydiff:0.5"}),
            "a decode server computes only the last tokens",
            "got ['keydiff']",
        ),
        (
            transfer() | settings_with(max_whole=512, piece=128),
            "arrives at once",
            "remove --kv-max-whole",
        ),
        (transfer() | {"tensor_parallel_size": 2}, "not tested together", "--tensor-parallel-size"),
        (
            transfer() | {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "--speculative-config and --kv-transfer-config were not tested",
            "remove --speculative-config",
        ),
        (offloading(offload_prompt_only=False), "from its kept tokens", "remove offload_prompt_"),
        (
            offloading() | settings_with(max_whole=512, piece=128),
            "later pieces of a prompt",
            "remove --kv-max-whole, got 512",
        ),
        (offloading("kv_producer"), "only tested as kv_both", "set kv_role to 'kv_both'"),
        (
            offloading(spec_name="TieringOffloadingSpec"),
            "spec_name CPUOffloadingSpec",
            "remove spec_name 'TieringOffloadingSpec'",
        ),
        (offloading(canonical_layout=True), "with at most", "remove canonical_layout True"),
        (
            offloading() | {"kv_events_config": {"enable_kv_cache_events": True}},
            "without KV events",
            "remove --kv-events-config",
        ),
        (
            offloading() | settings_with("snapkv", packed_dtype="k4v3", reuse="grid", lookahead=0),
            "--kv-offloading-size and --kv-reuse were not tested together",
            "remove --kv-offloading-size",
        ),
        (
            offloading() | {"data_parallel_size": 2},
            "were not tested together",
            "--data-parallel-size",
        ),
    ],
)
def test_other_connector_configurations_are_refused(model, options, reason, fix):
    with pytest.raises(ConfigError) as refusal:
        configure(model, **settings_with() | options)
    assert reason in str(refusal.value)
    assert fix in str(refusal.value)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_offloading_size": 1},
        offloading(spec_name="CPUOffloadingSpec", blocks_per_chunk=2),
        offloading() | {"enable_prefix_caching": False},
        simple(lazy_offload=True),
    ],
)
def test_offloading_is_configured(model, options):
    config = configure(model, **settings_with(lookahead=0) | options)
    connector = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    assert connector.__module__.startswith("vllm_kvcompress")
    # A second configuration from the same arguments is not refused because of the first.
    assert "kv_connector_module_path" not in str(options)
    without = configure(model, additional_config={}, **options)
    assert KVConnectorFactory.get_connector_class(without.kv_transfer_config) in connector.__bases__


def test_offloading_is_checked_however_it_is_set(model, monkeypatch, tmp_path, capsys):
    """By the environment and by a file for `--config`."""
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", "1")
    with pytest.raises(ConfigError, match="unset VLLM_USE_SIMPLE_KV_OFFLOAD"):
        configure(model, **settings_with(), kv_offloading_size=1)
    file = tmp_path / "lazy.yaml"
    keys = '{"kv_connector_extra_config": {"lazy_offload": true}}'
    file.write_text(f"kv-compress: cake\nkv-offloading-size: 1\nkv-transfer-config: '{keys}'\n")
    arguments = engine_args("--model", model, "--config", str(file))
    arguments.skip_tokenizer_init = True
    transfer = arguments.create_engine_config().kv_transfer_config
    assert transfer.kv_connector == "SimpleCPUOffloadConnector"
    assert transfer.kv_connector_module_path.startswith("vllm_kvcompress")
    assert set(transfer.kv_connector_extra_config) == {"cpu_bytes_to_use", "lazy_offload"}
    monkeypatch.delenv("VLLM_USE_SIMPLE_KV_OFFLOAD")
    file = tmp_path / "server.yaml"
    file.write_text("kv-compress: cake\nkv-max-whole: 2048\nkv-piece: 512\nkv-offloading-size: 1\n")
    arguments = engine_args("--model", model, "--config", str(file))
    arguments.skip_tokenizer_init = True
    with pytest.raises(SystemExit, match="2"):
        arguments.create_engine_config()
    assert "remove --kv-max-whole, got 2048" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("caching", "offloads", "where"),
    [
        (True, False, "fill the prefix cache but do not read it"),
        (False, True, "fill the host memory but do not read it"),
        (True, True, "fill the prefix cache and host memory but do not read them"),
        (False, False, None),
    ],
)
def test_the_log_says_where_prompts_are_stored_but_not_read(
    model, monkeypatch, caching, offloads, where
):
    """A method that reads all queries computes a prompt again; a prompt with cake-chunk is read."""
    lines = []
    monkeypatch.setattr(
        configure_module.logger, "info", lambda text, *args: lines.append(text % args)
    )
    options = {"enable_prefix_caching": caching} | (offloading() if offloads else {})
    for compress in ("h2o", "cake-chunk"):
        configure(model, **settings_with(compress, lookahead=0), **options)
    start = "h2o reads attention over the whole prompt, so prompts that it compresses "
    found = [line for line in lines if "reads attention over the whole prompt" in line]
    assert found == ([] if where is None else [start + where])


def test_vllm_connectors_without_our_attributes_are_refused():
    connector = OffloadingConnector.__new__(OffloadingConnector)
    connector.connector_scheduler = SimpleNamespace(_jobs={}, _req_status={})
    with pytest.raises(VllmHookError, match=r"_block_id_to_pending_jobs.*; install"):
        connector.bind(len)
    connector = SimpleCPUOffloadConnector.__new__(SimpleCPUOffloadConnector)
    connector.scheduler_manager = SimpleNamespace()
    with pytest.raises(VllmHookError, match=r"block_size.*; install"):
        connector.bind(len)
    connector.worker_handler = SimpleNamespace(load_stream=None)
    with pytest.raises(VllmHookError, match=r"_connector_metadata.*; install"):
        connector.register_kv_caches({})


@pytest.mark.parametrize("metadata", [None, SimpleNamespace(load_cpu_blocks=[])])
def test_a_step_without_lazy_loads_waits_for_nothing(metadata):
    connector, calls = SimpleCPUOffloadConnector.__new__(SimpleCPUOffloadConnector), []
    connector.worker_handler = SimpleNamespace(
        load_stream=SimpleNamespace(wait_stream=calls.append),
        start_load_kv=lambda: calls.append("start"),
        _connector_metadata=metadata,
    )
    connector.start_load_kv(None)
    assert calls == ["start"]


def test_models_with_other_layers_are_refused(checkpoints_folder):
    hybrid = make(next(iter(HYBRIDS)), checkpoints_folder)
    with pytest.raises(ConfigError, match="layers with a sliding window were not tested together"):
        configure(hybrid, **transfer() | settings_with())


@pytest.mark.usefixtures(without_videos.__name__)
def test_models_with_images_are_refused(checkpoints_folder):
    with pytest.raises(ConfigError, match="images were not tested together; remove --kv-transfer"):
        configure(make_vision("qwen3-vl", checkpoints_folder), **transfer() | settings_with())


def test_the_usage_report_travels_with_a_connectors_parameters():
    from vllm.v1.engine import EngineCoreOutput

    from vllm_kvcompress.engine.messages.outputs import attach_usage, take_usage

    settings_with = {"remote_request_id": "r"}
    output = EngineCoreOutput("r", [1], kv_transfer_params=settings_with)
    attach_usage(output, {"method": "cake"})
    assert take_usage(output) == {"method": "cake"}
    assert output.kv_transfer_params == settings_with == {"remote_request_id": "r"}
    assert take_usage(output) is None


def test_a_prompt_can_be_pulled_by_one_request_only(model):
    """The check runs when a request is generated and again when it becomes an engine request."""
    config, pulls = configure(model, **transfer() | settings_with()), Pulls()
    fields = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r"}
    for _ in range(2):
        pulls.check(config, {"kv_transfer_params": fields}, "one")
    other = dict(fields)
    with pytest.raises(OverrideError, match="another has pulled this prompt"):
        pulls.check(config, {"kv_transfer_params": other}, "two")
    # the refusal must not free blocks that the first request may still be reading
    assert not other["do_remote_prefill"]
    assert fields["do_remote_prefill"]
    again = {"kv_transfer_params": dict(fields)}
    with pytest.raises(OverrideError, match="another has pulled this prompt"):
        pulls.check(config, again, "one", begins=True)  # asked again with the same X-Request-Id
    pulls.check(config, {"kv_transfer_params": fields | {"remote_request_id": "s"}}, "two")
    pulls.check(config, {}, "three")
    for index in range(pulls.MAX_PROMPTS):
        changes = fields | {"remote_request_id": str(index)}
        pulls.check(config, {"kv_transfer_params": changes}, f"more {index}")
    assert len(pulls._by_prompt) == pulls.MAX_PROMPTS


@pytest.mark.parametrize(
    ("fields", "prompts"),
    [
        ({"prompt": "one"}, 1),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": ["one", "two"]}, 2),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": "one", "prompt_embeds": ["a", "b"]}, 3),
        ({"messages": [{"role": "user"}]}, 0),
        ({"messages": [[{"role": "user"}], [{"role": "user"}]]}, 2),
    ],
)
def test_prompts_of_a_request_are_counted(fields, prompts):
    assert prompts_of(SimpleNamespace(**fields)) == prompts
