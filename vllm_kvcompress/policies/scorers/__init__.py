"""Which tokens matter."""

from collections.abc import Mapping

from vllm_kvcompress.policies.base import Scorer
from vllm_kvcompress.policies.scorers.cake import CakeIndicator
from vllm_kvcompress.policies.scorers.position import StreamingLLM
from vllm_kvcompress.policies.scorers.window import SnapKV

SCORERS: Mapping[str, type[Scorer]] = {
    "streamingllm": StreamingLLM,
    "snapkv": SnapKV,
    "cake": CakeIndicator,
}
