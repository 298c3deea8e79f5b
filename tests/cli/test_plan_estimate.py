"""``kvcompress plan --gpu-memory``: the KV cache is estimated from weights and marked so."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from checkpoints import make
from engines import BLOCK
from vllm_kvcompress.commands.model_shape import read_config, shape_of
from vllm_kvcompress.commands.plan import ask
from vllm_kvcompress.commands.plan_options import PlanOptions
from vllm_kvcompress.commands.weights import Weights, weights_of

HERE = ["--block-size", BLOCK, "--dtype", "float32", "--device", "cpu"]


def planned(model: str, length: int, output: int, given: dict, **more):
    options = dict(memory_gib=None, dtype="float32", ranks=1, longest=None, requests=256)
    options |= {"block_size": BLOCK, "device": "cpu", **more}
    found = ask(
        PlanOptions(
            model=model, everything=json.dumps(given), length=length, output=output, **options
        )
    )
    return found.found


# -- an estimate of the KV cache -------------------------------------------------------------------


def test_weights_are_read_from_headers_else_the_index_else_the_config(tiny, tmp_path):
    """Stored in float32, loaded in bfloat16: half of the file."""
    config = read_config(tiny)
    shape = shape_of(config)
    stored = sum(tensor.nbytes for tensor in load_file(Path(tiny, "model.safetensors")).values())
    read = weights_of(Path(tiny), config, shape)
    assert read == Weights(stored // 2, "safetensors headers")
    index = {"metadata": {"total_size": 12345}, "weight_map": {"a": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_of(tmp_path, config, shape).total_bytes == 12345
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "broken.safetensors").write_bytes(b"no header")
    counted = weights_of(tmp_path, config, shape)
    assert counted.source == "config.json"
    assert counted.total_bytes == pytest.approx(read.total_bytes, rel=0.01)
    four_bits = {**config, "quantization_config": {"quant_method": "awq", "bits": 4}}
    ends = 2 * config["vocab_size"] * config["hidden_size"] * 2
    layers = counted.total_bytes - ends
    assert weights_of(tmp_path, four_bits, shape).total_bytes == ends + layers // 4


def test_a_second_copy_of_the_weights_is_not_counted(tiny, tmp_path):
    """Mistral's repositories have consolidated.safetensors beside the files that vLLM loads."""
    config = read_config(tiny)
    shape = shape_of(config)
    once = weights_of(Path(tiny), config, shape)
    for name in ("consolidated.safetensors", "model-1.safetensors"):
        (tmp_path / name).symlink_to(Path(tiny, "model.safetensors"))
    assert weights_of(tmp_path, config, shape) == once
    (tmp_path / "other.safetensors").symlink_to(Path(tiny, "model.safetensors"))
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_of(tmp_path, config, shape) == once
    (tmp_path / "model-1.safetensors").unlink()
    assert weights_of(tmp_path, config, shape).source == "config.json"
    for name in ("other.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).unlink()
    assert weights_of(tmp_path, config, shape) == once


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        (dict(quant_method="modelopt", quant_algo="FP8"), 8),
        (dict(quant_method="modelopt", quant_algo="NVFP4"), 4.5),
        (dict(quant_method="modelopt", quantization=dict(quant_algo="nvfp4")), 4.5),
        (
            dict(
                quant_method="modelopt", quant_algo="NVFP4",
                config_groups={"group_0": {"weights": {"num_bits": 4}}},
            ),
            4.5,
        ),
        (dict(quant_method="modelopt"), 8),
    ],
)  # fmt: skip
def test_modelopts_bits_are_those_of_its_algorithm(tiny, tmp_path, quantization, bits):
    config = read_config(tiny)
    shape = shape_of(config)
    ends = 2 * config["vocab_size"] * config["hidden_size"] * 2
    plain = weights_of(tmp_path, config, shape).total_bytes - ends
    found = weights_of(tmp_path, {**config, "quantization_config": quantization}, shape)
    assert found.total_bytes == pytest.approx(ends + plain * bits / 16, abs=1)


def test_the_pool_is_estimated_from_the_gpu_and_marked(typed, tiny):
    flags = ["--len", 2000, "--gpu-memory", 80, "--tp", 2, "--gpu-memory-utilization", 0.5]
    found = json.loads(typed("plan", tiny, *flags, "--json").out)
    told = found["kv_cache_estimate"]
    assert told["estimated"] is True
    assert told["gpu_bytes"] == 80 * 2**30
    left = 40 * 2**30 - told["weights_bytes"] - told["working_bytes"]
    assert told["kv_cache_bytes"] == left == found["pool_off"]["pool_bytes"]
    assert found["pool_on"]["pool_bytes"] == left - found["extra_bytes"]
    assert found["pool_on"]["most"] == 1024  # vLLM's, from 70 GiB
    said = " ".join(typed("plan", tiny, *flags).out.split())
    assert "memory of the pool (estimated)" in said
    assert "The pool is an estimate: 0.5 of 80.00 GiB, less" in said
    assert "--max-num-seqs 1024, as vLLM takes it on GPUs of 80 GiB" in said
    given = json.loads(typed("plan", tiny, *flags, "--kv-memory", 1, "--json").out)
    assert given["kv_cache_estimate"] is None
    assert given["pool_off"]["pool_bytes"] == 2**30


def test_stages_share_the_layers_and_hold_one_end_each(typed, tiny, tmp_path):
    """Of two stages, the first one embeds and the last one has the head."""
    flags = ["--len", 2000, "--gpu-memory", 80, "--json"]
    one = json.loads(typed("plan", tiny, *flags).out)
    two = json.loads(typed("plan", tiny, *flags, "--pp", 2, "--tp", 2).out)
    shape = read_config(tiny)
    end = shape["vocab_size"] * shape["hidden_size"] * 2
    whole = one["kv_cache_estimate"]["weights_bytes"]
    assert not shape.get("tie_word_embeddings")
    assert two["kv_cache_estimate"]["weights_bytes"] == ((whole - 2 * end) // 2 + end) // 2
    assert (one["pipeline_parallel_size"], two["pipeline_parallel_size"]) == (1, 2)
    assert 4 * two["block_bytes"] == one["block_bytes"]
    said = " ".join(typed("plan", tiny, *flags[:-1], "--pp", 2, "--tp", 2).out.split())
    assert "bfloat16, 4 GPUs)" in said
    assert "in all layers of a stage, of which there are 2," in said


def test_stages_of_windows_are_refused_as_the_engine_refuses_them(typed, tmp_path):
    done = typed("plan", make("gpt-oss", tmp_path), "--len", 2000, "--pp", 2)
    assert done.status == 2
    assert (
        "pipeline stages of models with sliding windows or states are refused; set --pp 1"
        in done.err
    )
