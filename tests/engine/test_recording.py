"""What doctor notes of prompts that are packed between each other's pieces."""

import pytest
import torch
from vllm.sampling_params import SamplingParams

from vllm_kvcompress.engine.compression.role_counts import RoleCounts
from vllm_kvcompress.engine.diagnosis.recording import _Recorder
from vllm_kvcompress.engine.messages.spans import attach_spans
from vllm_kvcompress.engine.messages.step import PackRequest
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.settings.config import CompressionConfig

SIZE = 4
SETTINGS = CompressionConfig.parse({"compress": "snapkv", "window": 1})


def packed(recorder, tokens, slots, **more):
    """One layer of one head keeps `slots`."""
    pages = len(slots) // SIZE
    plan = PagePlan(num_layers=1, tokens=tokens, block_size=SIZE, window=1, budget=2, pages=pages)
    pack_request = PackRequest(
        request_id="r", settings=SETTINGS, plan=plan, tokens=tokens, destination=(), **more
    )
    recorder.packed(pack_request, torch.tensor([[slots]], dtype=torch.int32), torch.tensor([pages]))


def test_a_whole_prompt_between_the_pieces_of_another_is_its_own():
    recorder = _Recorder(buckets=8, parts={"odd": ((1, 2), (3, 4))})
    packed(recorder, 16, [0, 5, 10, 15], whole=False, ends=False)
    packed(recorder, 8, [1, 3, 5, 7])
    # of the first one's pages slot 1 is position 5, and slots 4 to 7 are 16 to 19
    packed(recorder, 20, [1, 3, 4, 7], whole=False)
    whole, pieces = recorder.prompts
    assert whole["share"] == [[0, 1, 0, 1, 0, 1, 0, 1]]
    assert (whole["parts"], pieces["parts"]) == ({"odd": 1}, {"odd": 0})
    kept = torch.zeros(20)
    kept[[5, 15, 16, 19]] = 1
    bucket = torch.arange(20) * 8 // 20
    want = torch.zeros(8).index_add_(0, bucket, kept) / torch.bincount(bucket)
    assert pieces["share"] == [want.tolist()]
    packed(recorder, 16, [0, 1, 2, 3], prefill=False)
    assert (len(recorder.prompts), recorder.answers) == (2, 1)


class Told:
    """A step in which one request is new, as far as it is read."""

    def __init__(self, request_id, roles, gone=()):
        params = SamplingParams(extra_args={"kvcompress_roles": {"user": [[0, 1]]}})
        attach_spans(params, (), roles)
        new = type("New", (), {"req_id": request_id, "sampling_params": params})
        self.scheduled_new_reqs, self.finished_req_ids = [new], set(gone)


@pytest.mark.parametrize("answered", [None, 0, 3])
@pytest.mark.parametrize("tokens", [24, 25, 27])
def test_what_a_server_counts_of_each_role_is_what_doctor_notes(tokens, answered):
    """By another way: on the device and before the tail is known, from what kernels are given."""
    layers, heads, prompt = 3, 2, tokens - (answered or 0)
    roles = {"system": ((0, 3),), "user": ((3, 9), (11, 14)), "template": ((9, 11), (14, prompt))}
    counts = torch.tensor([2, 4, 1])
    generator = torch.Generator().manual_seed(tokens + (answered or 9))
    kept = torch.full((layers, heads, 4 * SIZE), -1, dtype=torch.int32)
    for layer, pages in enumerate(counts.tolist()):
        for head in range(heads):
            order = torch.randperm(tokens // SIZE * SIZE, generator=generator)[: pages * SIZE]
            kept[layer, head, : pages * SIZE] = order.sort().values
    plan = PagePlan(
        num_layers=layers, tokens=tokens, block_size=SIZE, window=1, budget=9, pages=7
    )  # fmt: skip
    more = {"settings": SETTINGS, "plan": plan, "tokens": tokens, "destination": ()}
    pack_request = PackRequest(request_id="r", answered=answered, **more)
    recorder, counting = _Recorder(buckets=8, parts=roles), RoleCounts()
    counting.begin_step(Told("r", roles))
    for packed_by in (recorder.packed, counting.packed):
        packed_by(pack_request, kept, counts)
    counted = counting.take("r")
    told = counted.shares(pack_request, counted.pairs.tolist())
    assert {role: share for role, _, share in told} == pytest.approx(recorder.prompts[0]["parts"])
    assert sum(own.tokens for own in told) == prompt
    assert counting.take("r") is None
    # of what was packed piece by piece a slot is no position, and nothing is told
    counting.packed(PackRequest(request_id="r", whole=False, **more), kept, counts)
    assert counting.take("r") is None
    # nor of another request of its name that does not ask, nor once it is gone
    for later in (Told("r", {}), Told("other", {}, gone=["r"])):
        counting.begin_step(Told("r", roles))
        counting.begin_step(later)
        counting.packed(pack_request, kept, counts)
        assert counting.take("r") is None
