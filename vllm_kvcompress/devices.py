"""Host-to-device copies that do not block the host."""

import torch


def to_device(values: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return `values` as `dtype` on `device`, without copying if they are already there.

    A copy from pageable memory blocks the host until the GPU reaches it, so host values are pinned
    first.
    """
    values = values.to(dtype)
    if values.device.type == "cpu" and device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
