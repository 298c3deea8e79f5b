"""``kvcompress plan --gpu-memory``: the size of the weights and the estimated KV pool."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from checkpoints import make
from vllm_kvcompress.commands.plan.model_shape import read_config, shape_of
from vllm_kvcompress.commands.plan.weights import Weights, weights_of

ROOT = Path(__file__).parents[2]
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_weights_are_sized_from_headers_then_the_index_then_the_config(tiny, tmp_path):
    """The file stores float32, which is loaded as bfloat16: half the bytes."""
    config = read_config(tiny)
    shape = shape_of(config)
    stored = sum(tensor.nbytes for tensor in load_file(Path(tiny, "model.safetensors")).values())
    from_headers = weights_of(Path(tiny), config, shape)
    assert from_headers == Weights(stored // 2, "safetensors headers")
    index = {"metadata": {"total_size": 12345}, "weight_map": {"a": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_of(tmp_path, config, shape).total_bytes == 12345
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "broken.safetensors").write_bytes(b"no header")
    from_config = weights_of(tmp_path, config, shape)
    assert from_config.source == "config.json"
    assert from_config.total_bytes == pytest.approx(from_headers.total_bytes, rel=0.01)
    four_bits = {**config, "quantization_config": {"quant_method": "awq", "bits": 4}}
    embeddings = 2 * config["vocab_size"] * config["hidden_size"] * 2
    layers = from_config.total_bytes - embeddings
    assert weights_of(tmp_path, four_bits, shape).total_bytes == embeddings + layers // 4


def test_consolidated_weights_are_not_counted_twice(tiny, tmp_path):
    """Mistral's repositories also have consolidated.safetensors, which vLLM does not load."""
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
def test_bits_of_modelopt_checkpoints_depend_on_the_algorithm(tiny, tmp_path, quantization, bits):
    config = read_config(tiny)
    shape = shape_of(config)
    embeddings = 2 * config["vocab_size"] * config["hidden_size"] * 2
    plain = weights_of(tmp_path, config, shape).total_bytes - embeddings
    forecast = weights_of(tmp_path, {**config, "quantization_config": quantization}, shape)
    assert forecast.total_bytes == pytest.approx(embeddings + plain * bits / 16, abs=1)


def test_the_pool_is_estimated_from_gpu_memory_and_marked(plan_text, plan_json, tiny):
    flags = ["--len", 2000, "--gpu-memory", 80, "--tp", 2, "--gpu-memory-utilization", 0.5]
    forecast = plan_json(tiny, *flags)
    estimate = forecast["kv_cache_estimate"]
    assert estimate["estimated"] is True
    assert estimate["gpu_bytes"] == 80 * 2**30
    left = 40 * 2**30 - estimate["weights_bytes"] - estimate["working_bytes"]
    assert estimate["kv_cache_bytes"] == left == forecast["pool_off"]["pool_bytes"]
    assert forecast["pool_on"]["pool_bytes"] == left - forecast["extra_bytes"]
    assert forecast["pool_on"]["most"] == 1024  # vLLM's default from 70 GiB
    output = plan_text(tiny, *flags)
    assert "KV pool (estimated)" in output
    assert "The pool size is an estimate: 0.5 of 80.00 GiB, minus" in output
    assert "--max-num-seqs defaults to 1024, as in vLLM on GPUs with 80 GiB" in output
    given = plan_json(tiny, *flags, "--kv-memory", 1)
    assert given["kv_cache_estimate"] is None
    assert given["pool_off"]["pool_bytes"] == 2**30


def test_documented_figures_are_those_of_the_command(run_in_process, tmp_path):
    """The folder has what the hub has of Llama 3.1 8B, except for the weights."""
    folder = tmp_path / "Llama-3.1-8B-Instruct"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    index = {"metadata": {"total_size": 16060522496}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def plan(*flags):
        text = run_in_process("plan", folder, "--len", 32768, *flags).out
        rows = [line.strip("│").split("│")[:3] for line in text.splitlines() if "│" in line]
        return [" ".join(cell.strip() for cell in row) for row in rows]

    page = (ROOT / "docs" / "cli.md").read_text()
    documented = re.findall(r"^\| (.*) \| ([\d,]+) \| ([\d,]+) \|$", page, re.MULTILINE)
    assert len(documented) == 8
    flags = ("--max-tokens", 512, "--gpu-memory", 80)
    printed = plan(*flags)
    assert {" ".join(row) for row in documented} <= set(printed)
    assert printed == plan(*flags, "--kv-budget", 0.2)  # recommended on a GPU
    runbook = " ".join((ROOT / "docs" / "runbook.md").read_text().split())
    assert "blocks while decoding 2,048 412" in printed
    assert "holds 412 blocks instead of 2,048" in runbook
    assert "requests at once, of mean size 12 39" in plan("--kv-memory", 50)
    assert "Of mean size, 39 requests fit instead of 12" in runbook


def test_pipeline_stages_share_layers_and_hold_one_embedding_each(plan_text, plan_json, tiny):
    """Of two stages, the first holds the embedding and the last the LM head."""
    flags = ["--len", 2000, "--gpu-memory", 80]
    one, two = plan_json(tiny, *flags), plan_json(tiny, *flags, "--pp", 2, "--tp", 2)
    shape = read_config(tiny)
    embedding = shape["vocab_size"] * shape["hidden_size"] * 2
    all_weights = one["kv_cache_estimate"]["weights_bytes"]
    assert not shape.get("tie_word_embeddings")
    of_a_rank = ((all_weights - 2 * embedding) // 2 + embedding) // 2
    assert two["kv_cache_estimate"]["weights_bytes"] == of_a_rank
    assert (one["pipeline_parallel_size"], two["pipeline_parallel_size"]) == (1, 2)
    assert 4 * two["block_bytes"] == one["block_bytes"]
    output = plan_text(tiny, *flags, "--pp", 2, "--tp", 2)
    assert "bfloat16, 4 GPUs)" in output
    assert "of all layers of one of the 2 pipeline stages:" in output


def test_pipeline_stages_of_windowed_models_are_refused(run_in_process, tmp_path):
    result = run_in_process("plan", make("gpt-oss", tmp_path), "--len", 2000, "--pp", 2)
    assert result.status == 2
    assert "were not tested together; remove --pipeline-parallel-size" in result.err
