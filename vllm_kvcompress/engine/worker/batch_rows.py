"""VllmHook `batch_rows`: which request is in which batch row, for models whose layers keep a state.

Model Runner V2 tells attention by ``CommonAttentionMetadata.req_idx``. For these models vLLM makes
that metadata without it (``MambaHybridModelState.prepare_attn``), from a batch that has the rows.
"""

from typing import Any

import numpy as np


class BatchRows:
    """Remembers the rows of the batch that a model's state prepares attention for.

    Wraps ``prepare_attn`` on the one instance of a runner; nothing of its body is repeated.
    """

    def __init__(self, model_state: Any) -> None:
        self.latest = np.zeros(0, dtype=np.intp)
        """``[R]``: each row's number in the runner's table of requests."""
        prepare = model_state.prepare_attn

        def preparing(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            self.latest = input_batch.idx_mapping_np
            return prepare(input_batch, *args, **kwargs)

        model_state.prepare_attn = preparing
