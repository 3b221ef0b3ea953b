"""A block manager with executors that check what it plans, one call a step."""

from itertools import count

from cache.blocks.groups import StateGroup
from cache.blocks.manager import BlockCache
from cache.leases import CacheRequest
from cache.null_executor import NullExecutor
from tests.cache.memory import RealMemory, Shape, make_storage
from tests.cache.radix.served import Served as AnyServed


class Served(AnyServed):
    """pages, slots: of each group; page: tokens a page, one for all groups or one each. Other
    options are the manager's own."""

    def __init__(self, make=BlockCache, *, pages=32, page=4, slots=8, states=1, **options):
        sizes = (page,) if isinstance(page, int) else page
        shape = Shape(tuple((pages, size) for size in sizes), (slots,) * states)
        self.storage = make_storage(shape)
        self.cache = make(self.storage, **dict(state_block=8) | options)
        self.executors = (NullExecutor(self.storage), RealMemory(self.storage))
        self._numbers = count()

    def request(self, name, ids, **options) -> CacheRequest:
        return CacheRequest(name, ids, **options)

    def pieces(self, ids, *, piece=9999, most=None, end="finish", new=0, **options) -> list[int]:
        """Where the pieces of a request end, that takes `new` more tokens one by one."""
        lease, ends = self.admit(ids, **options), []
        while lease.remaining and not lease.decodes:
            ends.append(self.step(lease, piece, max_chunk=most).end)
        for token in range(new):
            lease.tokens.append(2000 + token)
            ends.append(self.step(lease, 1).end)
        if end:
            getattr(self.cache, end)(lease)
            self.cache.audit()
        return ends

    def kept(self, ids, salt=None, kind=StateGroup) -> list[int]:
        """Boundaries of these tokens that the first group of a kind has a block for."""
        chain = self.cache.chain_of(ids, salt)
        group = next(group for group in self.cache.groups if isinstance(group, kind))
        boundaries = range(chain.unit, chain.reach + 1, chain.unit)
        return [n for n in boundaries if group.pool.find(chain.key(n, group.number))]
