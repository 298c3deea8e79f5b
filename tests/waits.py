"""Whether the host waits for a GPU, or uploads to it, told without one.

Tensors on the meta device stand for the GPU's. Values cannot be read from them, and an operator
that meets a tensor of the host at the same time is the upload, or the wait, that must not be.
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
    """Fails on any operator that takes or makes a tensor of the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        for x in tree_leaves((args, kwargs, made)):
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                raise AssertionError(f"{func} of a tensor of the host")
        return made


@contextmanager
def nothing_uploaded_or_read():
    """Making a meta tensor from a list is no upload, so the ways to do it are closed as well.

    A number that is put into one place of a GPU's tensor is copied from the host, which waits for
    that; into more than one place it is filled. On the meta device neither is seen.
    """
    put = torch.Tensor.__setitem__

    def refuse(*args, **options):
        raise AssertionError("a tensor of the host's values")

    def put_nothing_single(tensor, at, value):
        if not isinstance(value, torch.Tensor) and not tensor[at].dim():
            raise AssertionError(f"{value} in one place, which is a copy of the host's; fill_ it")
        put(tensor, at, value)

    with pytest.MonkeyPatch.context() as patch, OnTheDevice():
        patch.setattr(torch.Tensor, "__setitem__", put_nothing_single)
        for owner, name in UPLOADS:
            patch.setattr(owner, name, refuse)
        yield


def launches(monkeypatch):
    """From now on ops take meta tensors for a GPU's: the names of the kernels they launch."""
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
    monkeypatch.setattr(contract, "triton_takes", lambda tensor: tensor.is_meta)
    return names
