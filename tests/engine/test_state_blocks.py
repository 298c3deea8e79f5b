"""`kvcompress plan` for real models with state layers: block sizes and counts match vLLM's."""

import json

import pytest
from vllm.platforms.interface import Platform
from vllm.v1.attention.backend import MultipleOf

from checkpoints import STATEFUL, make, tokens
from configuring import configure
from engines import engine, settings, with_states
from vllm_kvcompress.commands.plan.command import make_plan
from vllm_kvcompress.commands.plan.options import PlanOptions
from vllm_kvcompress.engine.device_memory import sizes_of
from vllm_kvcompress.engine.layers import groups_of

DELTA = {
    "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "max_position_embeddings": 262144, "num_attention_heads": 16, "vocab_size": 151936,
}  # fmt: skip
QWEN35 = {
    **DELTA, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
    "hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 4,
}  # fmt: skip
MAMBA = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
REAL = {
    "Qwen3-Next-80B": {
        **DELTA, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
        "hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 2,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "Qwen3.5": QWEN35,
    "Qwen3.5 in float32": {**QWEN35, "mamba_ssm_dtype": "float32"},
    "Qwen3.5-27B": {
        **QWEN35, "mamba_ssm_dtype": "float32", "linear_num_value_heads": 48,
        "num_hidden_layers": 64, "num_attention_heads": 24, "hidden_size": 5120,
    },
    "Nemotron-H-8B": {
        **MAMBA, "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_hidden_layers": 52, "head_dim": 128, "ssm_state_size": 128, "mamba_num_heads": 128,
        "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "max_position_embeddings": 8192,
    },
    "Granite-4-H-small": {
        **MAMBA, "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid", "num_hidden_layers": 40,
        "layer_types": ["attention" if at % 10 == 5 else "mamba" for at in range(40)],
        "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
        "mamba_d_conv": 4, "mamba_expand": 2, "max_position_embeddings": 131072,
        "num_local_experts": 72, "num_experts_per_tok": 10,
    },
}  # fmt: skip
# model, ranks, block size, groups with states, their blocks, shortest prompt that frees a block:
# every layer keeps a page, so a prompt needs two full blocks
BLOCKS = [
    ("Qwen3-Next-80B", 1, 544, 3, 6, 2 * 544),
    ("Qwen3-Next-80B", 4, 272, 3, 6, 1024),
    ("Qwen3.5", 1, 272, 3, 6, 1024),
    ("Qwen3.5 in float32", 1, 528, 3, 6, 2 * 528),
    ("Qwen3.5-27B", 1, 784, 3, 6, 2 * 784),
    ("Nemotron-H-8B", 1, 1040, 6, 6, 2 * 1040),
    ("Granite-4-H-small", 1, 528, 9, 9, 2 * 528),
]


@pytest.fixture
def model(tmp_path):
    def write(name):
        (tmp_path / "config.json").write_text(json.dumps({**REAL[name], "dtype": "bfloat16"}))
        return str(tmp_path)

    return write


def planned(path, length=16000, output=500, **more):
    options = dict(compress_config='{"compress": "cake", "budget": 0.2}', requests=64) | more
    return make_plan(PlanOptions(model=path, length=length, output=output, **options))


@pytest.mark.parametrize(("name", "ranks", "block", "groups", "states", "pays"), BLOCKS)
def test_plan_counts_long_blocks_and_states(name, ranks, block, groups, states, pays, model):
    plan = planned(model(name), ranks=ranks)
    found, layer_groups = plan.forecast, plan.shape.groups
    assert (found.block_size, layer_groups.stateful_groups) == (block, groups)
    assert layer_groups.full_groups == 1
    full = -(-16499 // block)
    assert found.off.end == full + states
    assert found.on.end < found.off.end / 1.5
    assert found.pays_from == pays
    for length in range(pays, pays + 4 * block, block // 3):
        longer = planned(model(name), ranks=ranks, length=length).forecast
        assert longer.on.decoding < longer.off.decoding, length
    shorter = [
        planned(model(name), ranks=ranks, length=length).forecast
        for length in (pays - 1, max(pays - block, 1))
    ]
    assert any(each.on.decoding == each.off.decoding for each in shorter)


@pytest.fixture
def aligned(monkeypatch):
    """A function that lets vLLM enlarge a configuration's block size until a state fits."""

    class Backend:
        get_supported_kernel_block_sizes = staticmethod(lambda *_: [MultipleOf(16)])
        customize_spec = staticmethod(lambda spec: spec)

    monkeypatch.setattr(Platform, "_find_non_ssm_backends", classmethod(lambda *_: [Backend]))

    def align(config):
        Platform._align_hybrid_block_size(config, Backend)
        return config

    return align


@with_states
@pytest.mark.parametrize(
    ("name", "cached", "state_dtype", "block"),
    [
        ("Qwen3-Next-80B", True, "auto", 544),
        ("Qwen3-Next-80B", False, "auto", 544),
        ("Qwen3-Next-80B", False, "float32", 1056),
        ("Qwen3-Next-80B", True, "float16", 544),
        ("Nemotron-H-8B", False, "auto", 1040),
        ("Nemotron-H-8B", False, "bfloat16", 528),
        ("Granite-4-H-small", False, "auto", 528),
        ("Granite-4-H-small", False, "float32", 1040),
    ],
)
def test_block_size_matches_vllm(name, cached, state_dtype, block, model, aligned):
    """With blocks of 16 tokens as on CUDA. Qwen3.5 is left out because it needs torchvision."""
    path = model(name)
    config = configure(path, block_size=16, enable_prefix_caching=cached)
    # vLLM's "auto" depends on the processor for Nemotron: float32 if it has bfloat16 instructions.
    default = "float32" if "Nemotron" in name else "auto"
    config.cache_config.mamba_ssm_cache_dtype = default if state_dtype == "auto" else state_dtype
    found = planned(path, state_dtype=state_dtype, prefix_caching=cached)
    assert aligned(config).cache_config.block_size == found.forecast.block_size == block
    assert groups_of(config) == found.shape.groups
    assert found.shape.groups.states == (2 if cached else 1)


@with_states
@pytest.mark.parametrize(
    ("name", "more", "ranks", "block"),
    [
        ("Qwen3-Next-80B", {}, 4, 272),
        # Every rank has the one group, and its convolution is a large part of the state.
        ("Nemotron-H-8B", {"n_groups": 1, "conv_kernel": 400}, 4, 2832),
        ("Nemotron-H-8B", {}, 2, 1040),
        ("Granite-4-H-small", {}, 4, 528),
        ("Granite-4-H-small", {"mamba_d_head": "auto"}, 1, 528),
        # Qwen3-Next does not read this setting.
        ("Qwen3-Next-80B", {"mamba_ssm_dtype": "float32"}, 1, 544),
    ],
)
def test_block_size_matches_vllm_on_several_ranks(name, more, ranks, block, aligned, tmp_path):
    config = {**REAL[name], **more, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    config = configure(str(tmp_path), block_size=16, enable_prefix_caching=False)
    config.parallel_config.tensor_parallel_size = ranks
    config.cache_config.mamba_ssm_cache_dtype = "float32" if "Nemotron" in name else "auto"
    found = planned(str(tmp_path), prefix_caching=False, ranks=ranks).forecast
    assert aligned(config).cache_config.block_size == found.block_size == block


@with_states
@pytest.mark.parametrize(
    ("name", "state_dtype", "block"),
    [
        ("Qwen3-Next-80B", "float32", 1056),
        ("Qwen3-Next-80B", "bfloat16", 544),
        ("Granite-4-H-small", "float32", 1040),
        ("Granite-4-H-small", "bfloat16", 528),
        ("Nemotron-H-8B", "float16", 528),
    ],
)
def test_block_size_matches_vllm_on_a_cpu(name, state_dtype, block, model, aligned):
    """A CPU sums in the requested 16-bit type too."""
    path, options = model(name), {"enable_prefix_caching": "Qwen" in name}
    config = aligned(configure(path, block_size=16, mamba_ssm_cache_dtype=state_dtype, **options))
    found = planned(path, state_dtype=state_dtype, device="cpu", block_size=16).forecast
    assert config.cache_config.block_size == found.block_size == block


@with_states
@pytest.mark.parametrize("name", ["granite-96", "qwen3-next"])
def test_planned_blocks_match_the_engine(name, checkpoints_folder):
    path, length, output = make(name, checkpoints_folder), 700, 100
    compression = settings("cake", 0.4)
    options = dict(
        dtype=STATEFUL[name].dtype, mamba_ssm_cache_dtype="float32", max_model_len=1024,
        enable_prefix_caching=name == "qwen3-next",
    )  # fmt: skip
    with engine(path, additional_config=compression, **options) as llm:
        config, free = llm.scheduler.vllm_config, llm.free_blocks
        found = planned(
            path, length, output, compress_config=json.dumps(compression["kvcompress"]),
            block_size=32, dtype=STATEFUL[name].dtype, longest=1024, device="cpu",
        ).forecast  # fmt: skip
        assert found.block_size == llm.manager.block_size == 96
        assert found.block_bytes == sizes_of(config).block_bytes
        cache = llm.scheduler.kv_cache_config
        assert found.block_bytes * cache.num_blocks == cache.kv_cache_tensors[0].size
        llm.submit("r", tokens(length, seed=1), output)
        held = []
        while llm.llm.llm_engine.has_unfinished_requests():
            llm.step()
            if llm.compressor.compressed:
                held.append(free - llm.free_blocks)
        # The second state block of a group is allocated only when its next block begins.
        groups = groups_of(config)
        spare = groups.stateful_groups * (groups.states - 1)
        assert found.on.decoding - spare <= held[1] <= found.on.decoding
        assert found.on.end - spare <= max(held[1:]) <= found.on.end
        assert found.off.end > found.on.end
