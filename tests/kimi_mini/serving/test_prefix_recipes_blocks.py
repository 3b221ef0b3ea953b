"""Faults that users of such software have met (bug_reports.md), as recipes for hashed blocks alone:
hashes, holders, and what a block of keys keeps alive.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cache.blocks.groups import RowGroup
from cache.blocks.keys import HashChain
from cache.identity import Identity
from cache.pools.allocator import OwnershipError
from tests.kimi_mini.serving.reuse import BLOCKS, assert_all_comes_back
from tests.kimi_mini.serving.toy import P, Served, X, fresh

by_both_rules = pytest.mark.parametrize("rules", BLOCKS, ids=str)


@by_both_rules
def test_br13_a_state_is_out_of_reach_behind_a_gap_in_the_rows(rules):
    """The third page of four is lost, and the state at the end of the fourth is still there."""
    served = Served(rules, grid=32, retention="none", prefill_chunk=32)
    served.reuse([*P, 5], 1)
    rows = next(group for group in served.cache.groups if isinstance(group, RowGroup))
    rows.pool.forget(rows.pool.find(served.cache.chain_of(P).key(48, rows.number)))
    own = served.ask([*P, *X])
    assert (own.hit.joint, own.hit.token_hit, own.hit.junction) == (32, 32, None)


@by_both_rules
def test_br24_books_are_as_small_as_the_pools(rules):
    """Keys are bytes of their own, as many as there are blocks; those that are remembered as lost
    are no more than that."""
    served = Served(rules, kv_pages=40, state_slots=40)
    for seed in range(5):
        served.reuse(fresh(seed, 500), 1)
    assert served.cache.stats().evictions.tokens > 40 * 16
    for pool in served.cache.block_pools:
        entries = [*pool.entries()]
        assert len(entries) <= pool.size and len(pool._lost) <= pool.size
        assert all(type(entry.key) is bytes and len(entry.key) == 36 for entry in entries)


@by_both_rules
def test_br38_a_block_is_let_go_as_often_as_it_was_held(rules):
    served = Served(rules)
    served.reuse(P, 1)
    pool = served.cache.groups[0].pool
    block = next(entry.block for entry in pool.entries())
    with pytest.raises(OwnershipError, match="nobody holds"):
        pool.release([block])
    pool.hold([block, block])
    pool.release([block])
    assert block.id not in pool.queue
    pool.release([block])
    assert block.id in pool.queue
    assert_all_comes_back(served.engine)


SCRIPT = """
from cache.blocks.keys import HashChain
from cache.identity import Identity
origin = Identity("m", "t").origin("tenant")
chain = HashChain(origin, range({tokens}), 16, adapter="a")
print([chain.key(n, 1).hex() for n in range(16, {tokens} + 1, 16)])
"""


def test_br72_a_key_is_the_same_in_every_process_and_for_ids_of_any_kind():
    root = Path(__file__).resolve().parents[3]
    said = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT.format(tokens=64)],
            capture_output=True, text=True, cwd=root, env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    ids = [*range(64)]
    for tokens in (ids, np.array(ids), torch.tensor(ids)):
        chain = HashChain(Identity("m", "t").origin("tenant"), tokens, 16, adapter="a")
        said.append(f"{[chain.key(n, 1).hex() for n in range(16, 65, 16)]}\n")
    assert len(set(said)) == 1 and said[0].count("'") == 8
