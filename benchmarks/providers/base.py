"""What a provider hands to the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..operands import Outcome


@dataclass(frozen=True)
class Prepared:
    """A provider's step of one case, on copies of the operands of its own.

    Attributes:
        step: Does the op once and waits for it. The first call is verified, the later
            ones are timed.
        read: Given what the first step returned, tells what it left.
    """

    step: Callable[[], Any]
    read: Callable[[Any], Outcome]
