"""What a call costs: never more for a larger tree."""

from tests.cache.radix.planting import Garden


class Steps:
    """Counts what a tree does where its cost is: nodes that its orders look at or look after."""

    def __init__(self, tree, monkeypatch):
        self.touched = 0
        for order in (tree.leaves, tree.state_order):
            for name in ("update", "may_go"):
                monkeypatch.setattr(order, name, self.counting(getattr(order, name)))

    def counting(self, call):
        def counted(*args):
            self.touched += 1
            return call(*args)

        return counted


def test_the_cost_of_a_call_does_not_depend_on_the_size_of_the_tree(monkeypatch):
    """Nodes that a call looks after, in a tree of 3 nodes and of 3000: the same."""
    counts = []
    for size in (3, 3000):
        garden = Garden(pages=2 * size + 40, slots=size + 10)
        tree = garden.tree
        for i in range(size):
            (slot,) = garden.slots.alloc(1)
            tree.insert([1000 + i, 1], garden.pages.alloc(2), slot)
        with monkeypatch.context() as patch:
            steps, seen = Steps(tree, patch), []
            for call in (
                lambda tree=tree: tree.match([1000, 1, 5]),
                lambda tree=tree: tree.match([1001, 9]),
                lambda tree=tree: tree.evict_kv(1),
                lambda tree=tree: tree.evict_states(1),
                lambda g=garden, t=tree: t.insert(
                    [1000, 1, 2, 3], g.pages.alloc(4), g.slots.alloc(1)[0]
                ),
                lambda tree=tree: tree.unlock(tree.lock(tree.match([1000, 1]).node)),
            ):
                call()
                seen.append(steps.touched)
        counts.append(seen)
    assert counts[0] == counts[1]


def test_a_state_eviction_does_not_look_at_older_locked_states_again(monkeypatch):
    """Also if those are locked and let go in between: twice the locks, and each costs one look."""
    size = 300
    garden = Garden(pages=3 * size, slots=3 * size)
    tree = garden.tree
    for i in range(2 * size):
        tree.insert([i], garden.pages.alloc(1), garden.slots.alloc(1)[0])
    receipts = [tree.lock(tree.peek([i]).node) for i in range(size)]
    with monkeypatch.context() as patch:
        steps = Steps(tree, patch)
        for i in range(size):
            tree.unlock(receipts[i])
            receipts[i] = tree.lock(receipts[i].node)
            assert tree.evict_states(1) == (1, 1)
    garden.audit()
    assert steps.touched < 20 * size  # a scan would look at size² of them
