"""What a tree would have saved if its states were evicted by another policy: the requests that were
served, again, one after the other, on books without memory (serving 4.11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cache.boundaries import floored, junction_above
from cache.policy.eviction import FlopAware, Served
from cache.pools.pool import Pool
from cache.radix.tree import Match, RadixTree


class Rehearsal(NamedTuple):
    """Of a tree with so many pages of `page` tokens, so many slots, and states on multiples of
    `unit`, itself one of `page`."""

    pages: int
    page: int
    slots: int
    unit: int

    def saved_flops(self, policy: FlopAware, requests: Sequence[Served]) -> int:
        """FLOPs that hits save. A request without room for all that it would store stores nothing.
        Deterministic."""
        pages, slots = Pool(self.pages, "page", 1), Pool(self.slots, "slot", 1)
        tree, saved = RadixTree(pages, self.page, slots, eviction=policy), 0
        for request in requests:
            match = tree.match(request.tokens[: request.prompt - 1], request.salt)
            saved += policy.flops.of(match.depth)
            self._store(tree, match, request)
        return saved

    def _store(self, tree: RadixTree, match: Match, request: Served) -> None:
        boundaries = self._boundaries(match, request)
        receipt = tree.lock(match.node)
        count = boundaries[-1] // self.page - len(match.pages) if boundaries else 0
        if tree.make_room(count, len(boundaries)):
            row, owned = [*match.pages, *tree.pages_pool.alloc(count)], match.depth
            for boundary in boundaries:
                (slot,) = tree.states_pool.alloc(1)
                key = request.tokens[:boundary]
                done = tree.insert(key, row, slot, owned=owned, salt=request.salt)
                if done.refused:
                    tree.states_pool.free([slot])
                owned, row[: boundary // self.page] = boundary, tree.pages_of(done.node)
        tree.unlock(receipt)

    def _boundaries(self, match: Match, request: Served) -> list[int]:
        """Junction, prompt end and last token, as far as they are new."""
        junction = junction_above(match.kv_depth, match.depth, self.unit) or 0
        ends = (floored(n, self.unit) for n in (request.prompt - 1, len(request.tokens)))
        return sorted({n for n in (junction, *ends) if n > match.depth})
