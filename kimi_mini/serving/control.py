"""What a caller may say about the prefix cache, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.packing import integers


@dataclass(frozen=True)
class CacheControl:
    """What a request has to do with the prefix cache.

    cache_salt     separates key spaces (tenants): equal prompts of different salts share nothing
    skip_read      compute everything; what is computed is cached as usual
    checkpoint_at  boundaries worth keeping, in tokens of the prompt: the end of a system prompt, of
                   the tools; floored to pages
    Raises ValueError for values of another type, and for boundaries below 1.
    """

    cache_salt: str | None = None
    skip_read: bool = False
    checkpoint_at: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.cache_salt, str | None):
            raise ValueError(f"cache_salt must be a string or None, got {self.cache_salt!r}")
        if not isinstance(self.skip_read, bool):
            raise ValueError(f"skip_read must be true or false, got {self.skip_read!r}")
        boundaries = tuple(integers("checkpoint_at", self.checkpoint_at))
        if any(boundary < 1 for boundary in boundaries):
            raise ValueError(f"checkpoint_at must be 1 or more tokens, got {min(boundaries)}")
        object.__setattr__(self, "checkpoint_at", boundaries)
