"""A scheduler whose prompts are pulled, without workers: a stand-in completes the loads.

The scheduler, its blocks and all that is planned are real. What is not: the connector, and tokens.
"""

import copy
from unittest.mock import MagicMock

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from engines import settings
from vllm_kvcompress.engine.messages.settings import active_settings
from vllm_kvcompress.engine.messages.step import StepReport, attach_report
from vllm_kvcompress.engine.scheduling.cache_spec import CompressedSpec
from vllm_kvcompress.engine.scheduling.compression_stats import CompressionStats
from vllm_kvcompress.engine.scheduling.scheduler import CompressingScheduler

SIZE = 32


def connector():
    """Pulls all of a prompt that is not here, once."""
    stand_in = MagicMock()

    def matched(request, computed):
        asked = (request.kv_transfer_params or {}).get("do_remote_prefill")
        return (request.num_prompt_tokens - computed, True) if asked else (0, False)

    def allocated(request, blocks, tokens):
        if request.kv_transfer_params:
            request.kv_transfer_params["do_remote_prefill"] = False

    stand_in.get_num_new_matched_tokens.side_effect = matched
    stand_in.update_state_after_alloc.side_effect = allocated
    stand_in.request_finished.return_value = (False, None)
    stand_in.has_pending_block_frees.return_value = False
    stand_in.get_loaded_kv_cache_group_ids.return_value = ()
    stand_in.take_events.return_value = stand_in.get_kv_connector_stats.return_value = None
    stand_in.supports_divergent_local_hybrid_hits = False
    return stand_in


class Uncollected(CompressionStats):
    def take(self):
        return None


class Pulling:
    """One scheduler.

    Args:
        usual: a configuration of vLLM's.
        blocks: of the pool, the null block included.
        slots: for look-aheads.
        own: as for `engines.settings`.
    """

    def __init__(self, usual, blocks, slots, **own):
        config = copy.copy(usual)
        config.cache_config = copy.copy(usual.cache_config)
        config.cache_config.num_gpu_blocks = blocks
        spec = CompressedSpec(
            block_size=SIZE,
            num_kv_heads=2,
            head_size=16,
            dtype=torch.float32,
            num_compressed_layers=2,
            settings=active_settings(settings(**own)),
            ring_slots=slots,
        )
        group = KVCacheGroupSpec(["l0", "l1"], spec)
        self.scheduler = CompressingScheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], [group]),
            structured_output_manager=MagicMock(),
            block_size=SIZE,
            log_stats=False,
        )
        self.scheduler.connector = connector()
        self.scheduler.recompute_kv_load_failures = True
        self.manager = self.scheduler.compressed_manager
        # nobody takes the counts, so they add up
        self.manager.compression_stats = Uncollected()
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(SIZE, sha256)
        # whose loads are not complete, such as were aborted included
        self.loading = []

    @property
    def free(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(self, name, prompt, answer=40, *, pull=True):
        extra = {"kv_transfer_params": {"do_remote_prefill": True}} if pull else None
        params = SamplingParams(max_tokens=answer, ignore_eos=True, extra_args=extra)
        request = Request(name, prompt, params, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def step(self, done=(), failed=()):
        """A step, behind which these loads are complete; returns how many tokens it computes.

        Args:
            failed: those of `done` of which nothing came behind half of their blocks.
        """
        scheduler = self.scheduler
        output = scheduler.schedule()
        _, plan = scheduler._handed_out[-1]
        names = list(output.num_scheduled_tokens)
        requests = [scheduler.requests[name] for name in names]
        ends = [each.num_computed_tokens >= each.num_tokens for each in requests]
        held = [self.manager.req_to_blocks[name] for name in failed]
        invalid = {block.block_id for blocks in held for block in blocks[len(blocks) // 2 :]}
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[5] if end else [] for end in ends],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=KVConnectorOutput(
                finished_recving=set(done), invalid_block_ids=invalid
            ),
        )
        if plan is not None:
            attach_report(result, StepReport(carried_out=plan.number, packed=()))
        scheduler.update_from_output(output, result)
        self.loading = [name for name in self.loading if name not in done]
        for name, each in scheduler.requests.items():
            loads = each.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            if loads and name not in {*self.loading, *scheduler.finished_recving_kv_req_ids}:
                self.loading.append(name)
        return dict(output.num_scheduled_tokens)

    def abort(self, name):
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
