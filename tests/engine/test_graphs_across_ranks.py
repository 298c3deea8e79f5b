"""CUDA graph modes of data-parallel ranks, with vLLM's own synchronisation of two ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.gpu import cudagraph_utils, dp_utils

from checkpoints import make
from vllm_kvcompress.engine.worker.worker import watch_every_layer

DECODE, PROMPT_END, CHUNK = (3, 3, 1), (1, 1, 1), (2, 7, None)
"""Batches as (requests, tokens, tokens per request if uniform): three decodes, a one-token last
chunk, and a decode with a chunk of six tokens."""


@pytest.fixture
def ranks(monkeypatch, checkpoints_folder):
    """Return a function that runs one step on two ranks with captured graphs, each in a thread."""
    one = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: one)
    monkeypatch.setattr(CpuPlatform, "get_global_graph_pool", lambda self: None, raising=False)
    config = EngineArgs(
        make("llama-one-layer", checkpoints_folder), skip_tokenizer_init=True, max_model_len=512
    ).create_engine_config()
    config.scheduler_config.max_num_seqs = 8
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 4, 8]
    config.compilation_config.max_cudagraph_capture_size = 8
    config.parallel_config.data_parallel_size = 2
    contributions, barrier = {}, threading.Barrier(2)

    def all_reduce(tensor, group=None):
        contributions[threading.get_ident()] = tensor.clone()
        barrier.wait(300)
        tensor.copy_(sum(contributions.values()))
        barrier.wait(300)
        contributions.clear()

    # a method of the group since vLLM 0.33
    group = SimpleNamespace(cpu_group=None, cpu_all_reduce_=all_reduce)
    monkeypatch.setattr(dp_utils, "get_dp_group", lambda: group)
    if hasattr(dp_utils, "dist"):
        monkeypatch.setattr(dp_utils, "dist", SimpleNamespace(all_reduce=all_reduce))

    def run(mode, *batches):
        """Return the graph mode that both ranks run.

        Args:
            mode: configured graph mode.
            batches: for each rank, its batch and whether its layers must be observed.
        """

        def step(rank):
            manager = cudagraph_utils.CudaGraphManager(config, torch.device("cpu"), mode, 1)
            manager._graphs_captured = True
            (requests, count, uniform), planned = batches[rank]
            compressor = SimpleNamespace(must_run_layers_in_python=planned)
            runner = SimpleNamespace(cudagraph_manager=manager)
            watch_every_layer(runner, compressor, config.parallel_config)
            descriptor, agreed = dp_utils.dispatch_cg_and_sync_dp(
                manager, requests, count, uniform, 2, rank
            )
            assert agreed.num_tokens_across_dp[rank] == descriptor.num_tokens
            return descriptor.cg_mode, agreed.num_tokens_across_dp.tolist()

        with ThreadPoolExecutor(2) as pool:
            (mode_0, tokens_0), (mode_1, tokens_1) = pool.map(step, range(2))
        assert tokens_0 == tokens_1
        assert mode_0 == mode_1
        return mode_0

    return run


MODES = [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("other", [DECODE, PROMPT_END, CHUNK])
@pytest.mark.parametrize("mine", [PROMPT_END, CHUNK])
def test_observed_step_runs_without_a_graph_on_all_ranks(ranks, mode, mine, other):
    for planned in (True, False):  # whether the other rank also observes layers
        assert ranks(mode, (mine, True), (other, planned)) == CUDAGraphMode.NONE
        assert ranks(mode, (other, planned), (mine, True)) == CUDAGraphMode.NONE


def test_other_steps_use_vllms_graph_mode(ranks):
    mode = CUDAGraphMode.FULL_AND_PIECEWISE
    assert ranks(mode, (DECODE, False), (PROMPT_END, False)) == CUDAGraphMode.FULL
    assert ranks(mode, (DECODE, False), (CHUNK, False)) == CUDAGraphMode.PIECEWISE
