"""Every op at the shapes of real models on a GPU, launched as the engine launches it.

Results must match the reference and be the same bit for bit in a second launch. Unused slots and
pages hold NaN. Without a GPU these shapes would take hours, so the tests are skipped.
"""

import pytest
import torch

from benchmarks.gpu.ops import OPS, mismatch
from benchmarks.gpu.prompt import DecodeStep, Prompt, Shape

pytestmark = pytest.mark.gpu

DEMO = {"heads": 9, "kv_heads": 3, "dim": 64}
SHAPES = {
    "8B": Shape(layers=3, tokens=1111, chunk=300),
    "8B-heads-first": Shape(layers=2, tokens=777, token_major=False),
    "8B-128k": Shape(layers=1, tokens=131072, chunk=256, budget=0.01),
    "8B-beyond-2**31-elements": Shape(layers=20, tokens=60000, chunk=256, budget=0.02),
    "demo-float16": Shape(layers=3, tokens=1500, dtype=torch.float16, **DEMO),
    "demo-float32": Shape(layers=2, tokens=600, block=32, dtype=torch.float32, **DEMO),
    "dim-80-window-8": Shape(layers=2, tokens=500, heads=8, kv_heads=2, dim=80, window=8),
}


@pytest.fixture(scope="module", params=SHAPES)
def shape(request, gpu):
    shape = SHAPES[request.param]
    free, _ = torch.cuda.mem_get_info(gpu)
    if 3 * shape.bytes > free:
        pytest.skip(f"needs {3 * shape.bytes / 2**30:.0f} GiB of free memory on the GPU")
    return shape


@pytest.fixture(scope="module", params=(Prompt, DecodeStep), ids=lambda kind: kind.__name__)
def work(request, shape, gpu):
    return request.param(shape, gpu, 0)


def results(op, work, layers):
    got = op.launch(work, layers)
    return [x.clone() for x in (op.read_outputs(work) if op.read_outputs else got)]


def test_every_op_matches_its_reference(work, shape):
    ops = [op for op in OPS if isinstance(work, op.inputs)]
    assert ops
    for op in ops:
        launches = op.launches(shape)
        for layers in {launches[0], launches[-1]}:
            got, second = (results(op, work, layers) for _ in range(2))
            assert mismatch(op, got, op.reference(work, layers)) <= op.tie_share, op.name
            assert all(torch.equal(a, b) for a, b in zip(got, second, strict=True)), op.name


def test_one_shape_exceeds_two_to_the_31_elements():
    shape = SHAPES["8B-beyond-2**31-elements"]
    assert shape.bytes // shape.dtype.itemsize > 2**31
