"""Device buffers from NumPy arrays and back, bfloat16 included."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from max.driver import CPU, Buffer, Device
from max.dtype import DType

from . import bfloat16


def to_buffer(
    values: npt.ArrayLike, dtype: DType, device: Device | None = None
) -> Buffer:
    """Copies an array to a device as `dtype`.

    Args:
        values: Any shape. For bfloat16, uint16 is taken as bits already
            encoded and everything else is rounded.
        dtype: Element type of the buffer.
        device: Where to; the CPU if not given.

    Returns:
        A new buffer that shares no memory with `values`.
    """
    if dtype == DType.bfloat16:
        array = np.asarray(values)
        bits = array if array.dtype == np.uint16 else bfloat16.encode(array)
        host = Buffer.from_numpy(np.array(bits, order="C"))
        host = host.view(DType.bfloat16, bits.shape)
    else:
        host = Buffer.from_numpy(np.array(values, dtype=dtype.to_numpy(), order="C"))
    return host.to(device or CPU())


def to_numpy(buffer: Buffer) -> npt.NDArray[Any]:
    """Copies a buffer to a NumPy array.

    Args:
        buffer: On any device.

    Returns:
        A new array of the buffer's dtype; float32 for bfloat16.
    """
    host = buffer.to(CPU())
    if host.dtype == DType.bfloat16:
        return bfloat16.decode(host.view(DType.uint16, host.shape).to_numpy())
    return host.to_numpy().copy()
