"""How many tokens the pages of compressed requests hold, in k4v3 (packed pages) and in auto."""

from kvcompress_kernels import k4v3
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.settings.config import CompressionConfig

CPU_BLOCK_WITH_GROUPS = 32
"""Tokens in a block on a CPU if requests can be packed in k4v3 and the user chose no size. vLLM's
default is 128. Kernels need multiples of 32."""


def packed_page_tokens(settings: CompressionConfig, block_size: int, itemsize: int) -> int | None:
    """Return how many tokens a packed page in k4v3 holds; None in auto, as in an ordinary page.

    Args:
        settings: settings of a request.
        block_size: tokens in a block.
        itemsize: bytes of a cached number.
    """
    if settings.resolved_packed_dtype == "auto":
        return None
    return k4v3.page_tokens(block_size, itemsize)


def mean_layer_tokens(plan: PagePlan) -> float:
    """Return the tokens that a layer keeps by a page plan, tail included, as the mean over layers.

    Where layers keep different numbers of pages, and a page holds more tokens than a block, layers
    that keep all tokens may fill their last page only partly. The mean is then smaller.
    """
    in_pages = plan.pages * plan.page_tokens / plan.num_layers
    return plan.leading_tokens + min(in_pages, plan.max_tokens_in_pages) + plan.tail
