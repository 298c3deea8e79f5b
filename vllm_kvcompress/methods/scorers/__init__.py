"""Scorers: which tokens matter."""

from collections.abc import Mapping

from vllm_kvcompress.methods.base import Scorer
from vllm_kvcompress.methods.scorers.accumulated import H2O
from vllm_kvcompress.methods.scorers.cake import CakeIndicator
from vllm_kvcompress.methods.scorers.caote import Caote, FastCaote
from vllm_kvcompress.methods.scorers.chance import Random
from vllm_kvcompress.methods.scorers.keydiff import KeyDiff
from vllm_kvcompress.methods.scorers.lagkv import LagKV
from vllm_kvcompress.methods.scorers.position import StreamingLLM
from vllm_kvcompress.methods.scorers.runs import Runs
from vllm_kvcompress.methods.scorers.tova import Tova
from vllm_kvcompress.methods.scorers.window import SnapKV

SCORERS: Mapping[str, type[Scorer]] = {
    "streamingllm": StreamingLLM,
    "h2o": H2O,
    "tova": Tova,
    "snapkv": SnapKV,
    "cake": CakeIndicator,
    "runs": Runs,
    "caote": Caote,
    "fastcaote": FastCaote,
    "keydiff": KeyDiff,
    "lagkv": LagKV,
    "random": Random,
}
