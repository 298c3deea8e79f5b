"""Copying a test's tensors to a device and back, tested with a second copy on the CPU."""

from functools import wraps

import pytest
import torch

import test_merged_rows
from cases import INTERPRETED
from kvcompress_kernels import value_norms as unwrapped


@pytest.fixture
def run_on_copies(device_runner):
    """Run an op on copies, and return its result and the arguments that it received."""
    calls = []

    def run(op, *args, **kwargs):
        def recording(*op_args, **op_kwargs):
            calls.append((op_args, op_kwargs))
            return op(*op_args, **op_kwargs)

        return device_runner(recording, torch.device("cpu"))(*args, **kwargs), calls[-1]

    return run


def test_copies_keep_strides_and_overlaps(run_on_copies):
    store = torch.arange(48.0).view(4, 3, 4)
    keys, values = store[..., :2].transpose(1, 2), store[:, 1:, 2:]
    _, call = run_on_copies(lambda *x, into: None, keys, (values, 7), into=store)
    (key_copy, (value_copy, number)), kwargs = call
    for copy, x in ((key_copy, keys), (value_copy, values), (kwargs["into"], store)):
        assert torch.equal(copy, x)
        assert (copy.stride(), copy.storage_offset()) == (x.stride(), x.storage_offset())
        assert copy.data_ptr() != x.data_ptr()
    assert number == 7
    kwargs["into"].fill_(5)
    assert (key_copy == 5).all()
    assert (value_copy == 5).all()


def test_writes_are_copied_back(run_on_copies):
    store = torch.zeros(6)
    result, _ = run_on_copies(lambda x: x.add_(1), store[1:4])
    assert store.tolist() == [0, 1, 1, 1, 0, 0]
    assert result.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.int64], ids=str)
def test_every_dtype_is_copied(run_on_copies, dtype):
    result, _ = run_on_copies(
        lambda x, empty: (x, empty), torch.ones(3).to(dtype), torch.zeros(0, 2)
    )
    assert result[0].dtype == dtype
    assert result[0].float().tolist() == [1, 1, 1]
    assert result[1].shape == (0, 2)


def test_tensors_on_another_device_are_not_copied(run_on_copies):
    x = torch.empty(3, device="meta")
    result, _ = run_on_copies(lambda x: x, x)
    assert result is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ops_in_helpers_of_other_test_modules_run_on_the_device(wrap_ops, device_runner, dtype):
    """On an H200, `merge_one` of another module ran the CPU code, whose sums round differently.

    Results of Triton kernels and of CPU code were then compared bit for bit.
    """
    calls = []

    def on_copies(op):
        @wraps(op)
        def run(*args, **kwargs):
            calls.append(op.__name__)
            return op(*args, **kwargs)

        return device_runner(run, torch.device("cpu"))

    wrap_ops(on_copies)
    counts = [9, 40, 1]
    test_merged_rows.test_batched_layers_merge_like_single_layers(dtype, counts, 1)
    assert calls == ["merge_evicted"] * (1 + len(counts))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs on CPU tensors")
def test_op_that_would_stay_on_the_cpu_is_an_error():
    values, pages = torch.ones(1, 1, 16, 8), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(AssertionError, match=r"CPU code of kvcompress_kernels\.value_norms"):
        unwrapped.value_norms_of_rows(values, pages[None], 16)
