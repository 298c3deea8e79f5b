"""Triton's interpreter raises an error if a kernel's integer overflows its type."""

import os

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _combine(x, out, n, HOW: tl.constexpr):
    value = tl.load(x)
    if HOW == "add":
        value = value + n
    elif HOW == "sub":
        value = value - n
    else:
        value = value * n
    tl.store(out, value)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("how", "start", "change"), [("add", 2**31 - 9, 9), ("sub", 8 - 2**31, 9), ("mul", 2**30, 2)]
)
def test_integer_overflow_is_an_error(how, start, change):
    x, out = torch.tensor([start, start]), torch.zeros(1, dtype=torch.int64)
    _combine[(1,)](x, out, change, how)
    assert out.item() == getattr(start, f"__{how}__")(change)
    x = x.int()
    out = torch.zeros(1, dtype=torch.int32)
    _combine[(1,)](x, out, change - 1, how)
    assert out.item() == getattr(start, f"__{how}__")(change - 1)
    with pytest.raises(Exception, match="OverflowError"):
        _combine[(1,)](x, out, change, how)
