"""bfloat16 for NumPy, which has no such type: bits in uint16, values in float32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROUND_HALF = np.uint32(0x7FFF)
_QUIET_BIT = np.uint32(0x0040)


def encode(values: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """Rounds float32 values to bfloat16, to nearest even.

    Args:
        values: Any shape; converted to float32 first.

    Returns:
        The bits, uint16, same shape. NaN stays NaN with its sign and the top of
        its payload; values past the largest finite bfloat16 become infinite.
    """
    bits = np.asarray(values, np.float32).view(np.uint32)
    upper = bits >> np.uint32(16)
    rounded = (bits + (_ROUND_HALF + (upper & np.uint32(1)))) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    # Rounding could carry a NaN's payload into its exponent, and dropping the
    # low half could leave an empty payload, which means infinity.
    quiet = np.where(upper & np.uint32(0x007F), upper, upper | _QUIET_BIT)
    return np.where(is_nan, quiet, rounded).astype(np.uint16)


def decode(bits: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Widens bfloat16 bits to float32, exactly.

    Args:
        bits: uint16, any shape.

    Returns:
        The values, float32, same shape.
    """
    wide = np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)
