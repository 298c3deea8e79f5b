"""Copies from the host to a device that the host does not wait for."""

import torch


def to_device(values: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy `values` to `device`, unless they are there already.

    A plain copy to a GPU waits until the GPU has come that far; one from pinned memory does not.
    """
    values = values.to(dtype)
    if values.device.type == "cpu" and device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
