"""How much each layer keeps."""

from collections.abc import Mapping

from vllm_kvcompress.policies.allocators.cake import Cake
from vllm_kvcompress.policies.allocators.d2o import D2O
from vllm_kvcompress.policies.allocators.dynamickv import DynamicKV
from vllm_kvcompress.policies.allocators.highest import Global
from vllm_kvcompress.policies.allocators.pyramid import Pyramid
from vllm_kvcompress.policies.allocators.uniform import Uniform
from vllm_kvcompress.policies.base import Allocator

ALLOCATORS: Mapping[str, type[Allocator]] = {
    "uniform": Uniform,
    "pyramid": Pyramid,
    "cake": Cake,
    "dynamickv": DynamicKV,
    "global": Global,
    "d2o": D2O,
}
