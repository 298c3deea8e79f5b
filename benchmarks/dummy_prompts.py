"""Pack prompts with kernel launches replaced by no-ops, to count launches and time the host.

The harness replaces every Triton launch with a no-op, so neither a GPU nor Triton's compiler is
needed. torch's own operators run on the chosen device: "meta" to count them, "cpu" to time them.
"""

import collections
import importlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcompress_kernels import contract
from vllm_kvcompress.engine.compression.compressor import PromptCompressor
from vllm_kvcompress.engine.compression.packer import PackJob
from vllm_kvcompress.engine.compression.reports import Stopwatch
from vllm_kvcompress.engine.compression.stages import Stages
from vllm_kvcompress.engine.compression.step_state import StepState
from vllm_kvcompress.engine.messages.step import PackLookahead, PackPrompt, PackRequest, StepPlan
from vllm_kvcompress.engine.pages import layouts, pool, query_ring
from vllm_kvcompress.engine.pages.pool import PagePool
from vllm_kvcompress.engine.pages.scales import Scales
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.page_plan import PagePlan, page_plan
from vllm_kvcompress.planning.packed_pages import packed_page_tokens
from vllm_kvcompress.schedules.kv_footprint import KVFootprint
from vllm_kvcompress.schedules.lookahead import LookaheadSchedule
from vllm_kvcompress.settings.config import CompressionConfig

_CONTENT = 3
"""Content of tensors that a kernel would have written: a valid page and a valid page count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a model, and of the prompts that are packed in one step.

    Args:
        layers: layers, L.
        tokens: tokens of the shortest prompt. Each further prompt has seven tokens more.
        requests: prompts that end in the same step.
        heads, kv_heads, head_dim: of a layer.
        block_size: tokens in a block.
        max_tokens: longest prompt that the engine takes.
    """

    layers: int = 32
    tokens: int = 8192
    requests: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    max_tokens: int = 131072


class DummyPrompts:
    """Prompts of a step that ends with their packing.

    Args:
        options: the engine's settings.
        shape: model and prompts.
        device: "meta", or "cpu".
        early: pack at the end of the prefill, not after the look-ahead.
    """

    def __init__(
        self, options: dict[str, Any], shape: Shape, device: str, *, early: bool = False
    ) -> None:
        self._settings = CompressionConfig.parse({"min_prompt": 64, **options})
        self._shape, self._device = shape, torch.device(device)
        self._ids = [f"prompt {index}" for index in range(shape.requests)]
        self._lookahead = 0 if early else self._settings.resolved_lookahead
        with replaced_launches(device):
            self._compressor = self._new_compressor()
            self._pool = self._compressor.pool
            self._queries = torch.zeros(
                self._settings.resolved_window,
                shape.heads,
                shape.head_dim,
                dtype=torch.bfloat16,
                device=device,
            )

    def _new_compressor(self) -> PromptCompressor:
        shape, device = self._shape, self._device
        max_blocks = -(-shape.max_tokens // shape.block_size)
        num_blocks = 8 + shape.requests * -(-2 * shape.tokens // shape.block_size)
        size = (shape.layers, num_blocks, shape.kv_heads, shape.block_size, 2 * shape.head_dim)
        cache = torch.zeros(size, dtype=torch.bfloat16, device=device)
        pages = PagePool(
            [*cache],
            max_requests=shape.requests + 1,
            max_rows=shape.requests + 1,
            max_blocks=max_blocks,
            block_size=shape.block_size,
            packs_groups=self._settings.packs_k4v3,
        )
        if window := self._settings.ring_window:
            pages.ring = query_ring.QueryRing(
                layers=shape.layers,
                slots=shape.requests + 2,
                requests=shape.requests + 2,
                window=window,
                heads=shape.heads,
                dim=shape.head_dim,
                max_rows=shape.requests + 1,
                dtype=torch.bfloat16,
                device=device,
            )
        return PromptCompressor(
            self._settings,
            pages,
            layouts.INTERLEAVED,
            scales=Scales([0.1] * shape.layers, [1.0] * shape.layers, device),
            stages=Stages([range(shape.layers)]),
            queries=(shape.heads, shape.head_dim, torch.bfloat16),
        )

    def pack(self) -> None:
        """Pack all prompts, as after a step that computed their last token, and forget them."""
        self.begin()
        self.run()
        self.end()

    def begin(self) -> None:
        """Bring the prompts into the state at the end of their step."""
        for request_id in self._ids:
            if self._lookahead:
                self._pool.keep_queries(request_id)
        jobs = [self._job(index) for index in range(self._shape.requests)]
        plan = StepPlan(number=1, pack=tuple(job.pack_request for job in jobs))
        self._compressor._step = StepState(plan, {}, {}, laid_out=True, jobs=jobs)

    def run(self) -> None:
        """Pack the prompts."""
        self._compressor.end_step()

    def end(self) -> None:
        """Forget the prompts."""
        self._compressor.reports._pending.clear()
        for request_id in self._ids:
            self._pool.forget(request_id)

    def _job(self, index: int) -> PackJob:
        shape, settings = self._shape, self._settings
        prompt_tokens = shape.tokens + 7 * index
        tokens = prompt_tokens + self._lookahead
        plan = self._plan(prompt_tokens)
        shared: dict[str, Any] = {
            "request_id": self._ids[index],
            "settings": settings,
            "plan": plan,
            "tokens": tokens,
            "destination": tuple(range(1, plan.blocks + 1)),
            "reads_page_tables": False,
        }
        request: PackRequest = (
            PackLookahead(**shared, output_tokens=self._lookahead, early_target="")
            if self._lookahead
            else PackPrompt(**shared)
        )
        method = settings.method.method_for(scored_by_output=plan.scored_by_output)
        layers = range(shape.layers)
        sums = {}
        if Reads.COLUMN_SUMS in method.reads:
            sums = dict.fromkeys(layers, torch.zeros(shape.heads, tokens, device=self._device))
        num_blocks = -(-tokens // shape.block_size)
        return PackJob(
            pack_request=request,
            method=method,
            blocks=torch.ones(num_blocks, dtype=torch.int64, device=self._device),
            queries={} if self._lookahead else dict.fromkeys(layers, self._queries),
            sums=sums,
            stopwatch=Stopwatch(self._device),
        )

    def _plan(self, prompt_tokens: int) -> PagePlan:
        shape, settings = self._shape, self._settings
        page_tokens = packed_page_tokens(settings, shape.block_size, torch.bfloat16.itemsize)
        if self._lookahead:
            schedule = LookaheadSchedule(
                settings=settings,
                num_layers=shape.layers,
                block_size=shape.block_size,
                prompt=prompt_tokens,
                max_tokens=prompt_tokens + 1000,
                prefilled=prompt_tokens,
                page_tokens=page_tokens,
            )
            footprint = KVFootprint(num_layers=shape.layers, block_size=shape.block_size)
            plan = schedule.plan(footprint, schedule.due)
        else:
            spec = settings.budget_spec(shape.layers, prompt_tokens)
            plan = page_plan(spec, shape.block_size, page_tokens=page_tokens)
        assert plan is not None, f"a prompt of {prompt_tokens} tokens is too short"
        return plan


@contextmanager
def replaced_launches(device: str) -> Iterator[list[str]]:
    """Replace every Triton launch with a no-op; yield the names of the kernels as they launch.

    On the CPU, new tensors get a content that is valid for page ids and counts, since no kernel
    writes them.
    """
    jit = importlib.import_module("triton.runtime.jit")
    names: list[str] = []

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **options: Any) -> None:
            names.append(kernel.fn.__name__)

        return run

    def upload(values: Any, device: Any, dtype: Any = None, out: Any = None) -> torch.Tensor:
        return out if out is not None else torch.empty(len(values), dtype=dtype, device=device)

    with ExitStack() as stack:

        def patch(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        patch(jit.JITFunction, "__getitem__", launch)
        patch(contract, "runs_triton", lambda tensor: device == "cpu" or tensor.is_meta)
        if device == "meta":
            for module in (pool, query_ring):
                patch(module, "async_tensor_h2d", upload)
        else:
            for owner, name in (
                (torch, "empty"),
                (torch, "empty_like"),
                (torch.Tensor, "new_empty"),
            ):
                patch(owner, name, _filled(getattr(owner, name)))
        yield names


def _filled(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, **options: allocate(*args, **options).fill_(_CONTENT)


@dataclass(frozen=True, slots=True)
class Launches:
    """Kernel launches and peak temporary memory of one packing.

    Args:
        torch: launches by torch, by operator.
        triton: launches of our own kernels, by kernel.
        peak_bytes: largest number of bytes that temporary tensors take at a time.
    """

    torch: collections.Counter[str]
    triton: collections.Counter[str]
    peak_bytes: int

    @property
    def total(self) -> int:
        return self.torch.total() + self.triton.total()


class _Counting(TorchDispatchMode):
    """Counts the operators that launch a kernel on the device, and the bytes that they allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: collections.Counter[str] = collections.Counter()
        self.peak_bytes = self._bytes = 0
        # By storage, the tensors that share it.
        self._users: collections.Counter[int] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = _on_device((args, kwargs)), _on_device(result)
        name = func.__name__.split(".")[0]
        is_launch = not (func.is_view or name.startswith(("empty", "new_empty", "detach")))
        if is_launch and (inputs or outputs):
            self.operators[name] += 1
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage._cdata in self._users or storage._cdata not in given:
                self._use(tensor, storage._cdata, storage.nbytes())
        return result

    def _use(self, tensor: torch.Tensor, storage: int, size: int) -> None:
        if not self._users[storage]:
            self._bytes += size
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        self._users[storage] += 1
        weakref.finalize(tensor, self._release, storage, size)

    def _release(self, storage: int, size: int) -> None:
        self._users[storage] -= 1
        if not self._users[storage]:
            del self._users[storage]
            self._bytes -= size


def _on_device(values: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(values)
    return [value for value in leaves if isinstance(value, torch.Tensor) and value.is_meta]


def count_launches(options: dict[str, Any], shape: Shape, *, early: bool = False) -> Launches:
    """Return what the packing of the prompts of one step launches, counted on meta tensors."""
    prompts = DummyPrompts(options, shape, "meta", early=early)
    # Inference mode would hide the operators inside composite operators.
    with replaced_launches("meta") as kernels, torch.no_grad():
        prompts.pack()  # fills caches
        prompts.begin()
        kernels.clear()
        with _Counting() as counting:
            prompts.run()
        return Launches(counting.operators, collections.Counter(kernels), counting.peak_bytes)
