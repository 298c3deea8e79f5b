"""Where the kernel tests run, their tolerance, and helpers for cases that several ops share."""

import os

import torch
from hypothesis import settings

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
KERNELS_RUN = INTERPRETED or ON_GPU
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}  # docs/methods.md 9


def property_test(examples, interpreted):
    """Return settings for `examples` fixed examples, or `interpreted` in the interpreter."""
    count = interpreted if INTERPRETED else examples
    return settings(derandomize=True, deadline=None, max_examples=count)


def assert_equal(got, want):
    """Check that two tuples of tensors (or None) are equal bit for bit."""
    for a, b in zip(got, want, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def assert_close(got, want, **tolerance):
    """Check that two tuples of tensors (or None) are close."""
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE | tolerance)
