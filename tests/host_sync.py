"""Detect, without a GPU, code that waits for the GPU or uploads host tensors to it.

Tensors on the meta device represent GPU tensors. Their values cannot be read, and an operator that
also takes or returns a CPU tensor is a forbidden upload or wait.
"""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcompress_kernels import contract

UPLOADS = (
    *((torch, name) for name in ("tensor", "as_tensor", "asarray", "from_numpy")),
    (torch.Tensor, "new_tensor"),
)


class OnTheDevice(TorchDispatchMode):
    """Raise AssertionError for any operator that takes or returns a CPU tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                raise AssertionError(f"{func} of a CPU tensor")
        return result


@contextmanager
def no_uploads_or_reads():
    """Raise AssertionError if the body uploads host values to the GPU or reads GPU values.

    Creating a meta tensor from a list dispatches no CPU operator, so `UPLOADS` are refused too.
    Assigning a number to a single element of a GPU tensor copies it from the host and waits;
    assigning to several elements launches a fill. The meta device shows neither.
    """
    set_item = torch.Tensor.__setitem__

    def refuse(*args, **options):
        raise AssertionError("this creates a tensor from host values")

    def refuse_single_elements(tensor, index, value):
        if not isinstance(value, torch.Tensor) and not tensor[index].dim():
            raise AssertionError(f"setting one element to {value} copies from the host; use fill_")
        set_item(tensor, index, value)

    with pytest.MonkeyPatch.context() as patch, OnTheDevice():
        patch.setattr(torch.Tensor, "__setitem__", refuse_single_elements)
        for owner, name in UPLOADS:
            patch.setattr(owner, name, refuse)
        yield


def launches(monkeypatch):
    """Let ops accept meta tensors as GPU tensors; return the names of later kernel launches."""
    from triton.runtime.jit import JITFunction

    names = []

    def launch(kernel, grid):
        def run(*args, **options):
            assert all(type(x) is int for x in grid), grid
            for x in (*args, *options.values()):
                assert not isinstance(x, torch.Tensor) or x.device.type == "meta"
            names.append(kernel.fn.__name__)

        return run

    monkeypatch.setattr(JITFunction, "__getitem__", launch)
    monkeypatch.setattr(contract, "runs_triton", lambda tensor: tensor.is_meta)
    return names
