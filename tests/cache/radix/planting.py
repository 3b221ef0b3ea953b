"""A tree over small pools, for tests: who inserts brings fresh indices, as a request would."""

from cache.boundaries import junction_above
from cache.identity import Identity
from cache.pools.pool import Pool
from cache.radix import key as keys
from cache.radix.audit import audit_tree
from cache.radix.node import Node, Receipt
from cache.radix.tree import Freed, Inserted, Match, RadixTree

LONG, OTHER, FORK = [1, 2, 3, 4, 5, 6, 7], [10, 11, 12], [1, 2, 3, 4, 5, 60, 70]  # R01


def upto(n: int, first: int = 1) -> list[int]:
    """n tokens in a row."""
    return list(range(first, first + n))


class Garden:
    """Every call is followed by the audit.

    free: (tokens, states). grid: what junctions are floored to. Other options are the tree's.
    """

    def __init__(self, *, page=1, pages=128, slots=20, cap=None, grid=4, **options):
        self.pages, self.slots = Pool(pages, "page", 1), Pool(slots, "slot", 1)
        self.tree = RadixTree(self.pages, page, self.slots, cap, **options)
        self.page, self.grid = page, grid

    @property
    def free(self) -> tuple[int, int]:
        return self.pages.free_count * self.page, self.slots.free_count

    def insert(self, tokens, *, owned=0, salt=None) -> Inserted:
        tokens = list(tokens)
        shared = self.tree.peek(tokens, salt).pages[: owned // self.page]
        fresh = self.pages.alloc(len(tokens) // self.page - len(shared))
        (slot,) = self.slots.alloc(1)
        done = self.tree.insert(tokens, [*shared, *fresh], slot, owned=owned, salt=salt)
        if done.refused:
            self.slots.free([slot])
        self.audit()
        return done

    def match(self, tokens, salt=None) -> Match:
        """What `peek` has said before, changing nothing."""
        before = self.shape(), [*self.tree.leaves], [*self.tree.state_order]
        seen = self.tree.peek(list(tokens), salt)
        assert (self.shape(), [*self.tree.leaves], [*self.tree.state_order]) == before
        match = self.tree.match(list(tokens), salt)
        assert (seen.depth, seen.kv_depth, seen.pages, seen.lost) == (
            (match.depth, match.kv_depth, match.pages, match.lost)
        )
        self.audit()
        return match

    def seen(self, tokens, salt=None) -> tuple[int, int, int | None]:
        """Joint boundary, token hit, junction."""
        match = self.match(tokens, salt)
        return match.depth, match.kv_depth, junction_above(match.kv_depth, match.depth, self.grid)

    def lock(self, node: Node, *, state=True) -> Receipt:
        receipt = self.tree.lock(node, state=state)
        self.audit()
        return receipt

    def unlock(self, receipt: Receipt) -> None:
        self.tree.unlock(receipt)
        self.audit()

    def evict(self, tokens=0, states=0) -> tuple[int, int]:
        """(tokens, states) that went: for tokens first, then for states."""
        freed: Freed = self.tree.evict_kv(tokens)
        self.audit()
        freed += self.tree.evict_states(states)
        self.audit()
        return tuple(freed)

    def node(self, tokens, salt=None) -> Node:
        """The node that ends exactly there."""
        key = keys.encode(list(tokens))
        for node in self.tree.nodes():
            path = b"".join(part.key for part in [*node.path()][::-1])
            if (path, node.salt) == (key, salt):
                return node
        raise LookupError(f"no node ends at {tokens} in {self.shape()}")

    def shape(self) -> dict[tuple, int | None]:
        """Path of edges → state slot, None for a tombstone."""
        return {
            tuple(tuple(keys.decode(part.key)) for part in [*node.path()][::-1]): node.state
            for node in self.tree.nodes()
        }

    def edges(self) -> list[tuple[list[int], bool]]:
        """(tokens of the edge, whether there is a state), depth first."""
        return [(keys.decode(n.key), n.state is not None) for n in self.tree.nodes()]

    def locks(self) -> list[tuple[int, int]]:
        """(of pages, of the state), depth first."""
        return [(node.kv_locks, node.state_locks) for node in self.tree.nodes()]

    def audit(self) -> None:
        faults = audit_tree(self.tree, (), Identity("model"))
        faults += self.pages.audit() + self.slots.audit()
        assert not faults, faults
