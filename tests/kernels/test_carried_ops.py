"""How the other tests' tensors get to a GPU and back: here to a second place on the CPU."""

import pytest
import torch


@pytest.fixture
def there(carry, monkeypatch):
    """Carry an op to copies, which on the CPU are told from their originals by their address."""
    seen = []

    def run(op, *args, **kwargs):
        def noting(*given, **named):
            seen.append((given, named))
            return op(*given, **named)

        return carry(noting, torch.device("cpu"))(*args, **kwargs), seen[-1]

    return run


def test_strides_and_overlaps_are_kept(there):
    store = torch.arange(48.0).view(4, 3, 4)
    keys, values = store[..., :2].transpose(1, 2), store[:, 1:, 2:]
    _, ((a, (b, number)), named) = there(lambda *x, into: None, keys, (values, 7), into=store)
    for x, was in ((a, keys), (b, values), (named["into"], store)):
        assert torch.equal(x, was)
        assert (x.stride(), x.storage_offset()) == (was.stride(), was.storage_offset())
        assert x.data_ptr() != was.data_ptr()
    assert number == 7
    named["into"].fill_(5)
    assert (a == 5).all()
    assert (b == 5).all()


def test_what_is_written_comes_back(there):
    store = torch.zeros(6)
    result, _ = there(lambda x: x.add_(1), store[1:4])
    assert store.tolist() == [0, 1, 1, 1, 0, 0]
    assert result.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.int64], ids=str)
def test_every_dtype_goes_there(there, dtype):
    result, _ = there(lambda x, empty: (x, empty), torch.ones(3).to(dtype), torch.zeros(0, 2))
    assert result[0].dtype == dtype
    assert result[0].float().tolist() == [1, 1, 1]
    assert result[1].shape == (0, 2)


def test_what_is_there_already_is_taken_as_it_is(there):
    x = torch.empty(3, device="meta")
    result, _ = there(lambda x: x, x)
    assert result is x
