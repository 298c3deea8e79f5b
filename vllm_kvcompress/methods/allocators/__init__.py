"""Allocators: how much each layer keeps."""

from collections.abc import Mapping

from vllm_kvcompress.methods.allocators.cake import Cake
from vllm_kvcompress.methods.allocators.d2o import D2O
from vllm_kvcompress.methods.allocators.dynamickv import DynamicKV
from vllm_kvcompress.methods.allocators.highest import Global
from vllm_kvcompress.methods.allocators.pyramid import Pyramid
from vllm_kvcompress.methods.allocators.uniform import Uniform
from vllm_kvcompress.methods.base import Allocator

ALLOCATORS: Mapping[str, type[Allocator]] = {
    "uniform": Uniform,
    "pyramid": Pyramid,
    "cake": Cake,
    "dynamickv": DynamicKV,
    "global": Global,
    "d2o": D2O,
}
