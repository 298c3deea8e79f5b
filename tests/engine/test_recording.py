"""The doctor's recorder of kept tokens, on packings made by hand."""

import pytest
import torch

from vllm_kvcompress.engine.doctor.kept_recorder import _Recorder
from vllm_kvcompress.engine.messages.step import PackLookahead, PackOutput, PackPiece, PackPrompt
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.settings.config import CompressionConfig

SIZE = 4
SETTINGS = CompressionConfig.parse({"compress": "snapkv", "window": 1})


def packed(recorder, tokens, slots, case=PackPrompt, **more):
    """Record a packing in which one layer with one head keeps `slots`."""
    pages = len(slots) // SIZE
    plan = PagePlan(num_layers=1, tokens=tokens, block_size=SIZE, window=1, budget=2, pages=pages)
    pack_request = case(request_id="r", settings=SETTINGS, plan=plan, tokens=tokens, **more)
    recorder.packed(pack_request, torch.tensor([[slots]], dtype=torch.int32), torch.tensor([pages]))


def test_prompt_packed_between_pieces_of_another_is_recorded_separately():
    recorder = _Recorder(buckets=8, parts={"odd": ((1, 2), (3, 4))})
    packed(recorder, 16, [0, 5, 10, 15], PackPiece)
    packed(recorder, 8, [1, 3, 5, 7], reads_page_tables=False)
    # After the first piece, slot 1 is position 5, and slots 4 to 7 are positions 16 to 19.
    packed(recorder, 20, [1, 3, 4, 7], reads_page_tables=True)
    single, pieces = recorder.prompts
    assert single["share"] == [[0, 1, 0, 1, 0, 1, 0, 1]]
    assert (single["parts"], pieces["parts"]) == ({"odd": 1}, {"odd": 0})
    kept = torch.zeros(20)
    kept[[5, 15, 16, 19]] = 1
    bucket = torch.arange(20) * 8 // 20
    expected = torch.zeros(8).index_add_(0, bucket, kept) / torch.bincount(bucket)
    assert pieces["share"] == [expected.tolist()]
    packed(recorder, 16, [0, 1, 2, 3], PackOutput)
    assert (len(recorder.prompts), recorder.output_packings) == (2, 1)


@pytest.mark.parametrize("output_tokens", [None, 0, 3])
@pytest.mark.parametrize("tokens", [24, 25, 27])
def test_shares_of_parts_are_means_over_layers_and_heads(tokens, output_tokens):
    layers, heads, prompt = 3, 2, tokens - (output_tokens or 0)
    parts = {"system": ((0, 3),), "user": ((3, 9), (11, 14)), "template": ((9, 11), (14, prompt))}
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
    shared = {
        "request_id": "r", "settings": SETTINGS, "plan": plan, "tokens": tokens,
        "reads_page_tables": False,
    }  # fmt: skip
    pack_request = (
        PackPrompt(**shared)
        if output_tokens is None
        else PackLookahead(**shared, output_tokens=output_tokens, early_target="")
    )
    recorder = _Recorder(buckets=8, parts=parts)
    recorder.packed(pack_request, kept, counts)
    # Every layer and head keeps the tail behind the last full page.
    tail = range(tokens // SIZE * SIZE, tokens)
    kept_by = [{*slots, *tail} for layer in kept.tolist() for slots in layer]
    expected = {}
    for name, spans in parts.items():
        inside = {token for start, stop in spans for token in range(start, stop)}
        total = sum(len(inside & each) for each in kept_by)
        expected[name] = total / (len(inside) * layers * heads)
    assert recorder.prompts[0]["parts"] == pytest.approx(expected)
