"""The tree against a model that knows prefixes only."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.cache.machine import QUICK
from tests.cache.radix.planting import Garden


def pages_of(tokens, page):
    return [tuple(tokens[: n + page]) for n in range(0, len(tokens) - page + 1, page)]


class Prefixes(RuleBasedStateMachine):
    """A tree against a model that knows no nodes: which prefix has which page, and which slot. What
    goes is the tree's choice; the model says what may."""

    salts = st.sampled_from([None, None, "s"])
    texts = st.builds(
        lambda stem, own: (stem + own)[:12],
        st.sampled_from([[1] * 12, [1, 1, 1, 2] * 3, [2] * 12]).flatmap(
            lambda text: st.integers(0, 12).map(lambda n: text[:n])
        ),
        st.lists(st.integers(1, 3), max_size=3),
    )

    @initialize(
        page=st.sampled_from([1, 2, 3]), cap=st.sampled_from([None, None, 1, 2]), keep=st.booleans()
    )
    def make(self, page, cap, keep):
        self.garden = Garden(page=page, pages=60 // page, slots=8, cap=cap, keep_tombstones=keep)
        self.tree, self.page = self.garden.tree, page
        self.pages, self.slots = {}, {}  # (salt, prefix) → page or slot
        self.held = []  # receipts with their prefixes, and whether with the state

    @rule(tokens=texts, salt=salts)
    def match(self, tokens, salt):
        own = [(salt, prefix) for prefix in pages_of(tokens, self.page)]
        walked = [p for p in own if p in self.pages]
        match = self.garden.match(tokens, salt)
        assert match.kv_depth == len(walked) * self.page
        assert match.depth == max((len(p[1]) for p in walked if p in self.slots), default=0)
        assert match.pages == [self.pages[p] for p in walked[: match.depth // self.page]]
        self.last = match.node, walked[: match.depth // self.page]

    @rule(tokens=texts, salt=salts, share=st.booleans())
    def insert(self, tokens, salt, share):
        room = self.garden.pages.free_count, self.garden.slots.free_count
        if room[0] < len(tokens) // self.page or not room[1]:
            return
        own = [(salt, prefix) for prefix in pages_of(tokens, self.page)]
        there = [p for p in own if p in self.pages]
        owned = self.tree.peek(tokens, salt).depth if share else 0
        done = self.garden.insert(tokens, owned=owned, salt=salt)
        assert done.already == len(there) * self.page
        assert done.refused == (not own or own[-1] in self.slots)
        pages = dict(zip(own, self.tree.pages_of(done.node), strict=True))
        assert all(pages[p] == self.pages[p] for p in there)
        self.pages |= pages
        if not done.refused:
            self.slots[own[-1]] = done.node.state
            self._thin_out(own)
        self.last = done.node, own
        self.agree()

    def _thin_out(self, own):
        """The cap, by what the tree has left of the states on this path."""
        cap, lost = self.tree.path_cap, []
        now = self._slots_of_tree()
        for p in [p for p in own if p in self.slots and p not in now]:
            lost.append(p)
            assert p != own[-1] and not self._locked(p) and self._ways_on(p) == 1
            del self.slots[p]
        left = [p for p in own if p in self.slots]
        spared = [p for p in left[:-1] if self._locked(p) or self._ways_on(p) != 1]
        assert cap is None or len(left) <= max(cap, len(spared) + 1)
        assert not lost or len(left) >= cap

    def _ways_on(self, p):
        """Edges that leave from a prefix at which a node ends."""
        return len({q[1][len(p[1]) :][: self.page] for q in self.pages if self._below(q, p)})

    @staticmethod
    def _below(q, p):
        return q[0] == p[0] and len(q[1]) > len(p[1]) and q[1][: len(p[1])] == p[1]

    def _locked(self, p):
        return any(with_state and own and own[-1] == p for _, own, with_state in self.held)

    @precondition(lambda self: hasattr(self, "last"))
    @rule(state=st.booleans())
    def lock(self, state):
        node, own = self.last
        if not all(p in self.pages for p in own):
            own = []  # it has been evicted since
        self.held.append((self.garden.lock(node, state=state), own, state))

    @precondition(lambda self: self.held)
    @rule(i=st.integers(0, 9))
    def unlock(self, i):
        self.garden.unlock(self.held.pop(i % len(self.held))[0])

    @rule(tokens=st.integers(1, 12), ahead=st.booleans())
    def evict_kv(self, tokens, ahead):
        before = self.tree.ledger()
        free = self.garden.pages.free_count
        if ahead:
            self.tree.evict_until(pages=free + -(-tokens // self.page))
            gone = (self.garden.pages.free_count - free) * self.page
        else:
            gone = self.garden.evict(tokens=tokens)[0]
        assert gone >= min(tokens, before.kv_evictable)
        held = {*self.slots}
        assert self._forget() == gone
        assert all(p not in self.pages for p in held - self.slots.keys())

    @rule(count=st.integers(1, 4))
    def evict_states(self, count):
        before, held = self.tree.ledger(), len(self.slots)
        tokens, states = self.garden.evict(states=count)
        assert states == min(count, before.state_evictable)
        assert self._forget() == tokens
        assert len(self.slots) == held - states

    def _forget(self):
        """What the tree has not any more was evictable: no page above one that stays, nothing that
        is locked. Returns the tokens that went."""
        pages, slots = self._pages_of_tree(), self._slots_of_tree()
        kept = {p for _, own, _ in self.held for p in own}
        gone = {p for p in self.pages if p not in pages}
        assert not gone & kept
        assert all(q in gone for p in gone for q in self.pages if self._below(q, p))
        for p in [p for p in self.slots if p not in slots]:
            assert not self._locked(p)
            del self.slots[p]
        for p in gone:
            del self.pages[p]
        self.agree()
        return len(gone) * self.page

    def _pages_of_tree(self):
        found = {}
        for node in self.tree.nodes():
            path = [*node.path()][::-1]
            tokens = [t for part in path for t in self._tokens(part)]
            for p, page in zip(pages_of(tokens, self.page), self.tree.pages_of(node), strict=True):
                found[node.salt, p] = page
        return found

    def _slots_of_tree(self):
        return {
            (node.salt, tuple(t for part in [*node.path()][::-1] for t in self._tokens(part))): (
                node.state
            )
            for node in self.tree.nodes()
            if node.state is not None
        }

    @staticmethod
    def _tokens(node):
        return [int.from_bytes(node.key[i : i + 4], "little") for i in range(0, len(node.key), 4)]

    def agree(self):
        assert self._pages_of_tree() == self.pages
        assert self._slots_of_tree() == self.slots
        locked = {p for _, own, _ in self.held for p in own}
        assert self.tree.ledger().kv_protected >= len(locked) * self.page


def test_the_tree_knows_the_prefixes_that_were_put_into_it():
    run_state_machine_as_test(Prefixes, settings=settings(QUICK, max_examples=50))
