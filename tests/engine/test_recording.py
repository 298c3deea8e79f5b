"""What doctor notes of prompts that are packed between each other's pieces."""

import torch

from vllm_kvcompress.engine.diagnosis.recording import _Recorder
from vllm_kvcompress.engine.messages.step import Pack
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.settings.config import CompressionConfig

SIZE = 4
SETTINGS = CompressionConfig.parse({"compress": "snapkv", "window": 1})


def packed(recorder, tokens, slots, **more):
    """One layer of one head keeps `slots`."""
    pages = len(slots) // SIZE
    plan = PagePlan(num_layers=1, tokens=tokens, block_size=SIZE, window=1, budget=2, pages=pages)
    todo = Pack(request_id="r", settings=SETTINGS, plan=plan, tokens=tokens, destination=(), **more)
    recorder.packed(todo, torch.tensor([[slots]], dtype=torch.int32), torch.tensor([pages]))


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
