"""A rehearsal hits what the cache itself would have: the same rules on the same requests."""

import random
from functools import partial

import pytest

from cache.blocks.manager import BlockCache
from cache.policy.admission import Marconi
from cache.policy.cost_model import PrefixFlops
from cache.policy.eviction import FlopAware
from cache.radix.manager import RadixCache
from cache.rehearsal import Rehearsal, without_memory
from tests.cache.blocks.served import Served as ServedByBlocks
from tests.cache.memory import Shape, make_storage
from tests.cache.radix.served import Served as ServedByTree

EXACT = PrefixFlops(1, 0)  # of so many tokens as many


class Recorder(FlopAware):
    """Remembers who was served."""

    def saw(self, request):
        self.record.append(request)


def policy_of(kind, alpha):
    policy = kind(EXACT, 4096, 32, alpha)
    policy.record = []
    return policy


def conversations(seed):
    """Prompts that go on from others, up to anywhere, each with the tokens it is to get."""
    rng, said = random.Random(seed), [[*range(100, 130)]]
    for n in range(100):
        before = rng.choice(said[-5:] if n % 3 else said)
        cut = rng.choice([len(before), rng.randrange(1, len(before) + 1)])
        prompt = [*before[: min(cut, 80)], *range(1000 * n, 1000 * n + rng.randrange(1, 20))]
        said.append(prompt)
        yield prompt, rng.randrange(1, 9)


TREE, BLOCKS = partial(RadixCache, state_chunk=4), partial(BlockCache, state_block=8)
RULES = {
    "tree": (TREE, 4),
    "tree, marconi": (partial(TREE, admission=Marconi()), 4),
    "tree, no buffer": (partial(TREE, strategy="no_buffer"), 1),
    "blocks": (BLOCKS, 4),
    "blocks, marconi": (partial(BLOCKS, admission=Marconi()), 4),
    "blocks, coarse exports": (partial(BLOCKS, export_alignment=8), 4),
}


@pytest.mark.parametrize("alpha", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize("name", RULES)
def test_a_rehearsal_hits_what_was_hit(name, alpha):
    make, page = RULES[name]
    policy = policy_of(Recorder, alpha)
    serving = ServedByTree if name.startswith("tree") else ServedByBlocks
    s = serving(partial(make, eviction=policy), page=page, pages=400 // page, slots=6)
    hits = [s.run(prompt, new=new).hit.joint for prompt, new in conversations(0)]
    assert sum(hits) > 200 and s.cache.stats().evictions.states > 20
    storage = make_storage(Shape(((400 // page, page),), (6,)))
    rehearsal = Rehearsal(lambda policy: make(without_memory(storage), eviction=policy), page)
    assert rehearsal.saved_flops(policy_of(FlopAware, alpha), policy.record) == sum(hits)
