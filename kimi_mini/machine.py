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
        raise ValueError(f"{what} would take {gigabytes(needed)}; there are {gigabytes(memory)}")


def gigabytes(count: int) -> str:
    """Bytes in whole gigabytes, in words; exact integers, so that no size is too large to say."""
    return f"{-(-count // 10**9):,} GB"
