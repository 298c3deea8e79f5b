"""Create a vLLM configuration without starting an engine."""

from vllm.engine.arg_utils import EngineArgs

import vllm_kvcompress
from engines import settings

vllm_kvcompress.register()


def configure(model: str, **options):
    """Return the configuration that ``LLM()`` and ``vllm serve`` create before loading."""
    config = options.pop("additional_config", settings())
    arguments = EngineArgs(
        model=model, skip_tokenizer_init=True, additional_config=config, **options
    )
    return arguments.create_engine_config()
