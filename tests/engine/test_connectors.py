"""KV connectors: the one that a decode server pulls with is configured, every other is refused."""

from types import SimpleNamespace

import pytest

from checkpoints import HYBRIDS, make
from configuring import configure
from engines import first_runner, settings
from vision_checkpoints import make as make_vision
from vision_checkpoints import without_videos
from vllm_kvcompress.engine.frontend.transfers import Pulls, prompts_of
from vllm_kvcompress.errors import ConfigError, OverrideError

pytestmark = first_runner

AHEAD = {"lookahead": 8}
NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"


def transfer(**more):
    usual = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_buffer_device": "cpu"}
    return {"kv_transfer_config": usual | more}


def own(compress="cake-chunk", **more):
    return {"additional_config": settings(compress, 0.3, **AHEAD | more)}


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make("llama-gqa", checkpoints_folder)


@pytest.mark.parametrize("name", ["NixlConnector", "NixlPullConnector"])
def test_a_decode_server_that_pulls_is_configured(model, name):
    config = configure(model, **transfer(kv_connector=name) | own())
    assert config.scheduler_config.scheduler_cls.endswith("CompressingScheduler")


@pytest.mark.parametrize(
    ("options", "reason", "cure"),
    [
        (transfer(kv_role="kv_producer"), "sends their blocks by position", "kv_consumer"),
        (transfer(kv_role="kv_both"), "sends their blocks by position", "got 'kv_both'"),
        (transfer(kv_connector="NixlPushConnector"), "what a prefill server pushes", "NixlConn"),
        (transfer(kv_connector="MultiConnector"), "by the place or the hash", "NixlConnector"),
        (transfer(kv_connector="LMCacheConnectorV1"), "by the place or the hash", "remove"),
        (transfer(kv_connector="OffloadingConnector"), "by the place or the hash", "offloading"),
        ({"kv_offloading_size": 1}, "by the place or the hash", "--kv-offloading-size"),
        (
            transfer(kv_connector_module_path=NIXL),
            "connectors of other packages",
            f"kv_connector_module_path, got {NIXL!r}",
        ),
        (
            transfer(kv_connector_extra_config={"bidirectional_kv_xfer": True}),
            "reads blocks back",
            "remove bidirectional_kv_xfer",
        ),
        (transfer(enable_permute_local_kv=True), "permuted", "remove enable_permute_local_kv"),
        (transfer(kv_buffer_device="cuda"), "a buffer on another device", "'cpu'"),
        (transfer() | own(lookahead=0), "so no window of it can judge", "--kv-lookahead"),
        (
            transfer() | own(allow_override="off,h2o"),
            "a decode server computes only the last tokens",
            "got ['h2o']",
        ),
        (
            transfer() | own(alias={"keys": "keydiff:0.5"}),
            "a decode server computes only the last tokens",
            "got ['keydiff']",
        ),
        (transfer() | own(max_whole=512, piece=128), "comes whole", "remove --kv-max-whole"),
        (transfer() | {"tensor_parallel_size": 2}, "several ranks", "--tensor-parallel-size 1"),
        (
            transfer() | {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "drafts behind a prompt that is pulled",
            "remove --speculative-config",
        ),
    ],
)
def test_all_else_is_refused_by_name(model, options, reason, cure):
    with pytest.raises(ConfigError) as refusal:
        configure(model, **own() | options)
    assert reason in str(refusal.value)
    assert cure in str(refusal.value)


def test_models_with_other_layers_are_refused(checkpoints_folder):
    hybrid = make(next(iter(HYBRIDS)), checkpoints_folder)
    with pytest.raises(ConfigError, match="other layers than full attention are not tested"):
        configure(hybrid, **transfer() | own())


@pytest.mark.usefixtures(without_videos.__name__)
def test_models_that_take_images_are_refused(checkpoints_folder):
    with pytest.raises(ConfigError, match="models that take images are not tested behind"):
        configure(make_vision("qwen3-vl", checkpoints_folder), **transfer() | own())


def test_what_was_kept_travels_beside_a_connectors_parameters():
    from vllm.v1.engine import EngineCoreOutput

    from vllm_kvcompress.engine.messages.usage import attach_kept, take_kept

    own = {"remote_request_id": "r"}
    output = EngineCoreOutput("r", [1], kv_transfer_params=own)
    attach_kept(output, {"method": "cake"})
    assert take_kept(output) == {"method": "cake"}
    assert output.kv_transfer_params == own == {"remote_request_id": "r"}
    assert take_kept(output) is None


def test_a_prompt_is_pulled_by_one_request(model):
    """Seen where requests are generated, and again where they become the engine's."""
    config, pulls = configure(model, **transfer() | own()), Pulls()
    asked = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r"}
    for _ in range(2):
        pulls.check(config, {"kv_transfer_params": asked}, "one")
    other = dict(asked)
    with pytest.raises(OverrideError, match="another has pulled this prompt"):
        pulls.check(config, {"kv_transfer_params": other}, "two")
    # its refusal must not free what the first may still be reading
    assert not other["do_remote_prefill"]
    assert asked["do_remote_prefill"]
    again = {"kv_transfer_params": dict(asked)}
    with pytest.raises(OverrideError, match="another has pulled this prompt"):
        pulls.check(config, again, "one", begins=True)  # asked again with the same X-Request-Id
    pulls.check(config, {"kv_transfer_params": asked | {"remote_request_id": "s"}}, "two")
    pulls.check(config, {}, "three")
    for at in range(pulls.MOST):
        more = asked | {"remote_request_id": str(at)}
        pulls.check(config, {"kv_transfer_params": more}, f"more {at}")
    assert len(pulls._by_prompt) == pulls.MOST


@pytest.mark.parametrize(
    ("asked", "prompts"),
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
def test_prompts_of_a_request_are_counted(asked, prompts):
    assert prompts_of(SimpleNamespace(**asked)) == prompts
