"""Which graph data-parallel ranks run together, with vLLM's own agreement between two of them."""

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
"""Requests, tokens, tokens of each request if they have the same: three that decode, one whose
last chunk is a single token, and one that decodes beside a chunk of six."""


@pytest.fixture
def ranks(monkeypatch, checkpoints_folder):
    """Two ranks with captured graphs; each step of theirs runs in a thread."""
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
    told, all_here = {}, threading.Barrier(2)

    def all_reduce(tensor, group=None):
        told[threading.get_ident()] = tensor.clone()
        all_here.wait(300)
        tensor.copy_(sum(told.values()))
        all_here.wait(300)
        told.clear()

    # the group's own method since 0.33
    group = SimpleNamespace(cpu_group=None, cpu_all_reduce_=all_reduce)
    monkeypatch.setattr(dp_utils, "get_dp_group", lambda: group)
    if hasattr(dp_utils, "dist"):
        monkeypatch.setattr(dp_utils, "dist", SimpleNamespace(all_reduce=all_reduce))

    def run(mode, *batches):
        """What each rank will run, for its batch and whether it has a plan."""

        def step(rank):
            manager = cudagraph_utils.CudaGraphManager(config, torch.device("cpu"), mode, 1)
            manager._graphs_captured = True
            (requests, count, uniform), planned = batches[rank]
            compressor = SimpleNamespace(must_see_layers=planned)
            runner = SimpleNamespace(cudagraph_manager=manager)
            watch_every_layer(runner, compressor, config.parallel_config)
            found, agreed = dp_utils.dispatch_cg_and_sync_dp(
                manager, requests, count, uniform, 2, rank
            )
            assert agreed.num_tokens_across_dp[rank] == found.num_tokens
            return found.cg_mode, agreed.num_tokens_across_dp.tolist()

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
def test_a_step_that_is_watched_makes_no_rank_run_another_graph(ranks, mode, mine, other):
    for planned in (True, False):  # on the other rank too, or not
        assert ranks(mode, (mine, True), (other, planned)) == CUDAGraphMode.NONE
        assert ranks(mode, (other, planned), (mine, True)) == CUDAGraphMode.NONE


def test_all_other_steps_run_as_vllm_chooses(ranks):
    whole, pieces, _ = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
    mode = CUDAGraphMode.FULL_AND_PIECEWISE
    assert ranks(mode, (DECODE, False), (PROMPT_END, False)) == whole
    assert ranks(mode, (DECODE, False), (CHUNK, False)) == pieces
