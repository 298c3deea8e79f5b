"""The doctor's recorder and the server's role counts, on packings made by hand."""

import pytest
import torch
from vllm.sampling_params import SamplingParams

from vllm_kvcompress.engine.compression.role_counts import RoleCounts
from vllm_kvcompress.engine.doctor.kept_recorder import _Recorder
from vllm_kvcompress.engine.messages.options import attach_options
from vllm_kvcompress.engine.messages.step import PackRequest
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.request_options import RequestOptions

SIZE = 4
SETTINGS = CompressionConfig.parse({"compress": "snapkv", "window": 1})


def packed(recorder, tokens, slots, **more):
    """Record a packing in which one layer with one head keeps `slots`."""
    pages = len(slots) // SIZE
    plan = PagePlan(num_layers=1, tokens=tokens, block_size=SIZE, window=1, budget=2, pages=pages)
    pack_request = PackRequest(
        request_id="r", settings=SETTINGS, plan=plan, tokens=tokens, destination=(), **more
    )
    recorder.packed(pack_request, torch.tensor([[slots]], dtype=torch.int32), torch.tensor([pages]))


def test_prompt_packed_between_pieces_of_another_is_recorded_separately():
    recorder = _Recorder(buckets=8, parts={"odd": ((1, 2), (3, 4))})
    packed(recorder, 16, [0, 5, 10, 15], nothing_dropped=False, completes_prompt=False)
    packed(recorder, 8, [1, 3, 5, 7])
    # After the first piece, slot 1 is position 5, and slots 4 to 7 are positions 16 to 19.
    packed(recorder, 20, [1, 3, 4, 7], nothing_dropped=False)
    single, pieces = recorder.prompts
    assert single["share"] == [[0, 1, 0, 1, 0, 1, 0, 1]]
    assert (single["parts"], pieces["parts"]) == ({"odd": 1}, {"odd": 0})
    kept = torch.zeros(20)
    kept[[5, 15, 16, 19]] = 1
    bucket = torch.arange(20) * 8 // 20
    expected = torch.zeros(8).index_add_(0, bucket, kept) / torch.bincount(bucket)
    assert pieces["share"] == [expected.tolist()]
    packed(recorder, 16, [0, 1, 2, 3], prefill=False)
    assert (len(recorder.prompts), recorder.output_packings) == (2, 1)


class StepOutput:
    """The parts of a `SchedulerOutput` that `RoleCounts` reads, with one new request."""

    def __init__(self, request_id, roles, finished=()):
        params = SamplingParams(extra_args={"kvcompress_options": {"roles": {"user": [[0, 1]]}}})
        attach_options(params, RequestOptions(roles=roles))
        new = type("New", (), {"req_id": request_id, "sampling_params": params})
        self.scheduled_new_reqs, self.finished_req_ids = [new], set(finished)


@pytest.mark.parametrize("output_tokens", [None, 0, 3])
@pytest.mark.parametrize("tokens", [24, 25, 27])
def test_role_counts_match_the_doctors_recorder(tokens, output_tokens):
    """The server counts on the device from slots in pages; the doctor counts positions."""
    layers, heads, prompt = 3, 2, tokens - (output_tokens or 0)
    roles = {"system": ((0, 3),), "user": ((3, 9), (11, 14)), "template": ((9, 11), (14, prompt))}
    counts = torch.tensor([2, 4, 1])
    generator = torch.Generator().manual_seed(tokens + (output_tokens or 9))
    kept = torch.full((layers, heads, 4 * SIZE), -1, dtype=torch.int32)
    for layer, pages in enumerate(counts.tolist()):
        for head in range(heads):
            order = torch.randperm(tokens // SIZE * SIZE, generator=generator)[: pages * SIZE]
            kept[layer, head, : pages * SIZE] = order.sort().values
    plan = PagePlan(
        num_layers=layers, tokens=tokens, block_size=SIZE, window=1, budget=9, pages=7
    )  # fmt: skip
    more = {"settings": SETTINGS, "plan": plan, "tokens": tokens, "destination": ()}
    pack_request = PackRequest(request_id="r", output_tokens=output_tokens, **more)
    recorder, counting = _Recorder(buckets=8, parts=roles), RoleCounts()
    counting.begin_step(StepOutput("r", roles))
    for packed_by in (recorder.packed, counting.packed):
        packed_by(pack_request, kept, counts)
    counted = counting.take("r")
    shares = counted.shares(pack_request, counted.pairs.tolist())
    assert {role: share for role, _, share in shares} == pytest.approx(recorder.prompts[0]["parts"])
    assert sum(role.tokens for role in shares) == prompt
    assert counting.take("r") is None
    # In a prompt packed in pieces a slot is not a position, so nothing is counted.
    counting.packed(PackRequest(request_id="r", nothing_dropped=False, **more), kept, counts)
    assert counting.take("r") is None
    # Roles are dropped when the request finishes, or when its id is reused without roles.
    for later in (StepOutput("r", {}), StepOutput("other", {}, finished=["r"])):
        counting.begin_step(StepOutput("r", roles))
        counting.begin_step(later)
        counting.packed(pack_request, kept, counts)
        assert counting.take("r") is None
