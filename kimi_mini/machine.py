"""What this machine can hold: a refusal in words before an allocation that cannot succeed."""

from __future__ import annotations

import os


def memory_bytes() -> int | None:
    """Physical memory of this machine; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def refuse_oversize(what: str, needed: int) -> None:
    """ValueError if `needed` bytes are more than this machine has; `what` begins the sentence."""
    memory = memory_bytes()
    if memory is not None and needed > memory:
        # whole numbers, so that no size is too large to say; rounded away from each other
        up, down = -(-needed // 10**9), memory // 10**9
        raise ValueError(f"{what} would take {up:,} GB; there are {down:,} GB")
