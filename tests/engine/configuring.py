"""A vLLM configuration, as a command or a script makes one; no engine is started."""

from vllm.engine.arg_utils import EngineArgs

import vllm_kvcompress
from engines import settings

vllm_kvcompress.register()


def configure(model: str, **options):
    """Exactly what LLM() and ``vllm serve`` do before they load anything."""
    config = options.pop("additional_config", settings())
    arguments = EngineArgs(
        model=model, skip_tokenizer_init=True, additional_config=config, **options
    )
    return arguments.create_engine_config()
