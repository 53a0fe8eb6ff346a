"""An expert's bytes on their way: numpy's arrays to a CPU's slots, tensors to other devices.

A slice costs numpy a twentieth of what it costs torch, where a fetch needs several; and torch would copy with threads
of its own under each of those that fetch, and have them spin beside the matmuls. Other devices are torch's to copy to.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt
import torch

Bytes = torch.Tensor | npt.NDArray[np.uint8]
"""uint8 [n], contiguous."""


def bytes_for(device: torch.device, data: torch.Tensor) -> Bytes:
    """``data``, uint8 and contiguous, in the form in which it is copied from or to ``device``."""
    return data.detach().numpy() if device.type == "cpu" else data


def tensor_of(data: Bytes) -> torch.Tensor:
    """The same memory as a tensor."""
    return data if isinstance(data, torch.Tensor) else torch.from_numpy(data)


def copy_bytes(target: Bytes, data: Bytes) -> None:
    """Copy on the current stream; both as ``bytes_for`` the same device."""
    if isinstance(target, torch.Tensor):
        target.copy_(cast(torch.Tensor, data), non_blocking=True)
    else:
        np.copyto(target, data)


def copy_shared(target: Bytes, at: int, data: Bytes, start: int) -> None:
    """Copy what both cover: ``target`` begins at ``at`` of an expert's bytes, ``data`` at ``start``."""
    if at == start and len(target) == len(data):  # a slice would cost more than a small copy
        copy_bytes(target, data)
        return
    first, last = max(at, start), min(at + len(target), start + len(data))
    if first < last:
        copy_bytes(target[first - at : last - at], data[first - start : last - start])


class Staging:
    """A buffer that files are read into and ``device`` is filled from: ``filled`` by reads, ``given`` to copies."""

    def __init__(self, buffer: torch.Tensor, device: torch.device) -> None:
        """``buffer``: uint8 on the host, from ``Backend.host_buffer``."""
        self.filled: npt.NDArray[np.uint8] = buffer.numpy()
        self.given = bytes_for(device, buffer)
