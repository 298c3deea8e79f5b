"""Merging of evicted tokens into kept tokens on plain tensors: docs/methods.md 6."""

import numpy as np
import torch

import methods_reference as ref
from vllm_kvcompress.offline import compress


def test_merge_values_changes_only_values():
    """Kept tokens and merge targets are the same with any scorer, and keys keep their bits."""
    rs = np.random.RandomState(9)
    shapes = [(3, heads, 101, 16) for heads in (4, 2, 2)]
    q, k, v = (torch.from_numpy(rs.standard_normal(shape)).bfloat16() for shape in shapes)
    for preset in ("d2o", "chunkkv"):
        both, got = (
            compress(q, k, v, policy={"compress": preset, "merge": merge}, budget=0.5)
            for merge in (True, "values")
        )
        for layer, kept in enumerate(got.positions):
            assert torch.equal(kept, both.positions[layer])
            assert torch.equal(got.values[layer], both.values[layer])
            assert got.keys[layer].dtype == k.dtype
            assert not torch.equal(got.keys[layer], both.keys[layer])
            for head, positions in enumerate(kept):
                head_kv = (x[layer, head].double().numpy() for x in (k, v))
                want = ref.merge(*head_kv, positions.tolist(), values_only=True)
                np.testing.assert_array_equal(got.keys[layer][head].double(), want[0])
                values = got.values[layer][head].double()
                np.testing.assert_allclose(values, want[1], rtol=2**-7, atol=2**-7)


def test_d2o_merges_all_evicted_tokens_that_have_an_equal_kept_token():
    """Cosines are 1 up to rounding, so all reach their mean."""
    k = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    k = k[:, :, torch.arange(12) % 4]
    v = torch.arange(12.0)[None, None, :, None].expand(1, 1, 12, 4)
    kept = compress(torch.zeros(1, 1, 12, 4), k, v, policy="d2o", budget=8)
    assert kept.positions[0][0].tolist() == [0, 1, 2, 3, 4, 5, 10, 11]
    torch.testing.assert_close(kept.values[0][0, :4, 0], torch.tensor([4.0, 5.0, 4.0, 5.0]))
