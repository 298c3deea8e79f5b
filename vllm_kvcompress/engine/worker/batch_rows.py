"""VllmHook `batch_rows`: the request in each batch row, for models with state-space layers.

Model Runner V2 passes it to attention as ``CommonAttentionMetadata.req_idx``. For these models
``MambaHybridModelState.prepare_attn`` leaves that field out, but the batch that it receives has it.
"""

from typing import Any

import numpy as np


class BatchRows:
    """Records the rows of the latest batch by wrapping ``prepare_attn`` of one model state."""

    def __init__(self, model_state: Any) -> None:
        self.latest = np.zeros(0, dtype=np.intp)
        """``[R]``, each row's index in the runner's request table."""
        prepare = model_state.prepare_attn

        def preparing(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            self.latest = input_batch.idx_mapping_np
            return prepare(input_batch, *args, **kwargs)

        model_state.prepare_attn = preparing
