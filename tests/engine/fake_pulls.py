"""A scheduler with pulled prompts but without workers; a fake connector completes the loads.

The scheduler, its blocks and its compression plans are real. The connector and tokens are fake.
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
from vllm_kvcompress.engine.messages.cache_spec import CompressedSpec
from vllm_kvcompress.engine.messages.settings import active_settings
from vllm_kvcompress.engine.messages.step import StepReport, attach_report
from vllm_kvcompress.engine.scheduling.compression_stats import CompressionStats
from vllm_kvcompress.engine.scheduling.scheduler import CompressingScheduler

SIZE = 32


def connector():
    """Return a fake connector that pulls each prompt's missing tokens once."""
    fake = MagicMock()

    def matched(request, computed):
        pulls = (request.kv_transfer_params or {}).get("do_remote_prefill")
        return (request.num_prompt_tokens - computed, True) if pulls else (0, False)

    def allocated(request, blocks, tokens):
        if request.kv_transfer_params:
            request.kv_transfer_params["do_remote_prefill"] = False

    fake.get_num_new_matched_tokens.side_effect = matched
    fake.update_state_after_alloc.side_effect = allocated
    fake.request_finished.return_value = (False, None)
    fake.has_pending_block_frees.return_value = False
    fake.get_loaded_kv_cache_group_ids.return_value = ()
    fake.take_events.return_value = fake.get_kv_connector_stats.return_value = None
    fake.supports_divergent_local_hybrid_hits = False
    return fake


class AccumulatingStats(CompressionStats):
    def take(self):
        return None


class PullScheduler:
    """A scheduler with a fake connector.

    Args:
        vllm_config: configuration to copy.
        blocks: number of KV blocks, null block included.
        slots: number of look-ahead slots.
        options: arguments of `engines.settings`.
    """

    def __init__(self, vllm_config, blocks, slots, **options):
        config = copy.copy(vllm_config)
        config.cache_config = copy.copy(vllm_config.cache_config)
        config.cache_config.num_gpu_blocks = blocks
        spec = CompressedSpec(
            block_size=SIZE,
            num_kv_heads=2,
            head_size=16,
            dtype=torch.float32,
            num_compressed_layers=2,
            settings=active_settings(settings(**options)),
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
        self.manager = self.scheduler.groups.compressed
        # no engine takes the counts, so they add up
        self.scheduler.step_builder.stats = AccumulatingStats()
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(SIZE, sha256)
        # names of requests whose loads are not complete, including aborted requests
        self.loading = []
        # ids of blocks that may hold groups in k4v3
        self.with_groups = set()

    @property
    def free(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(self, name, prompt, max_tokens=40, *, pull=True):
        extra = {"kv_transfer_params": {"do_remote_prefill": True}} if pull else None
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        request = Request(name, prompt, params, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def session_part(self, name, prompt, *, resumable):
        """Return the next part of a session with streamed input."""
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        return Request(name, prompt, params, None, block_hasher=self._hasher, resumable=resumable)

    def step(self, done=(), failed=()):
        """Run one step; return the number of scheduled tokens by request.

        Args:
            done: requests whose loads complete in this step.
            failed: requests of `done` for which only the first half of the blocks was loaded.
        """
        scheduler = self.scheduler
        output = scheduler.schedule()
        _, plan = scheduler._steps_in_flight[-1]
        self._check_zeroed(plan)
        names = list(output.num_scheduled_tokens)
        requests = [scheduler.requests[name] for name in names]
        prefill_ends = [request.num_computed_tokens >= request.num_tokens for request in requests]
        request_blocks = [self.manager.req_to_blocks[name] for name in failed]
        invalid = {
            block.block_id for blocks in request_blocks for block in blocks[len(blocks) // 2 :]
        }
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[5] if prefill_end else [] for prefill_end in prefill_ends],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=KVConnectorOutput(
                finished_recving=set(done), invalid_block_ids=invalid
            ),
        )
        if plan is not None:
            attach_report(result, StepReport(executed_plan=plan.number, packed=()))
        scheduler.update_from_output(output, result)
        self.loading = [name for name in self.loading if name not in done]
        for name in self._waiting_for_loads():
            if name not in {*self.loading, *scheduler.finished_recving_kv_req_ids}:
                self.loading.append(name)
        return dict(output.num_scheduled_tokens)

    def _check_zeroed(self, plan):
        """Check that no request writes to a block that held groups and was not zeroed since."""
        requests, held = self.scheduler.requests, self.manager.req_to_blocks
        block_ids = {
            name: {block.block_id for block in held.get(name, ()) if not block.is_null}
            for name in requests
        }
        # a connector may write before the step starts
        for name in self._waiting_for_loads():
            assert not block_ids[name] & self.with_groups, name
        if plan is None:
            return
        self.with_groups -= set(plan.zero_blocks)
        for name, ids in block_ids.items():
            assert not ids & self.with_groups, name
        for pack in plan.pack:
            if pack.plan.packed_page_tokens is not None:
                self.with_groups |= set(pack.destination)

    def _waiting_for_loads(self):
        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        return [name for name, each in self.scheduler.requests.items() if each.status == waiting]

    def abort(self, name):
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
