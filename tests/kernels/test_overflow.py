"""In the interpreter, an integer of a kernel that outgrows its type is an error."""

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


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="about the interpreter")
@pytest.mark.parametrize(
    ("how", "start", "least"),
    [("add", 2**31 - 9, 9), ("sub", 8 - 2**31, 9), ("mul", 2**30, 2)],
)
def test_what_outgrows_its_type_is_an_error(how, start, least):
    x, out = torch.tensor([start, start]), torch.zeros(1, dtype=torch.int64)
    _combine[(1,)](x, out, least, how)
    assert out.item() == getattr(start, f"__{how}__")(least)
    x = x.int()
    out = torch.zeros(1, dtype=torch.int32)
    _combine[(1,)](x, out, least - 1, how)
    assert out.item() == getattr(start, f"__{how}__")(least - 1)
    with pytest.raises(Exception, match="OverflowError"):
        _combine[(1,)](x, out, least, how)
