"""Device memory by address: torch tensors over memory that torch did not allocate. Also for the CPU, for tests."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def bytes_at(address: int, nbytes: int, device: Any) -> torch.Tensor:
    """A uint8 tensor of ``nbytes`` over the memory at ``address`` of ``device``. It keeps nothing alive."""
    import torch

    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if torch.device(device).type == "cpu":
        return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)))
    view = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=view), device=device)
