"""How many tokens a packed page holds."""

from kvcompress_kernels import k4v3
from vllm_kvcompress.settings.config import CompressionConfig


def packed_page_tokens(settings: CompressionConfig, block_size: int, itemsize: int) -> int | None:
    """Return the tokens in a packed page; None if it holds the tokens of an ordinary page.

    Args:
        settings: settings of a request.
        block_size: tokens in a block.
        itemsize: bytes of a cached number.
    """
    if settings.resolved_packed_dtype == "auto":
        return None
    return k4v3.page_tokens(block_size, itemsize)
