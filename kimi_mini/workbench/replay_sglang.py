"""SGLang's golden scenarios: tree events through the tree's own methods, request events through the
contract, everything run by the null executor and audited after each event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cache.leases import CacheRequest, CopyKind, StepPlan, Wait
from cache.null_executor import NullExecutor
from cache.pools.allocator import OwnershipError
from cache.pools.storage import Sizes, one_of_each
from cache.radix import key as keys
from cache.radix.lease import RadixLease
from cache.radix.node import Node, Receipt
from cache.radix.sglang import SGLangCache
from cache.radix.strategy import Strategy
from kimi_mini.workbench.replay import (
    Incomparable,
    Level,
    Status,
    Verdict,
    compare,
    first_difference,
)

ABORTS = "the engine's process ends here; ours waits or refuses"
LEAKS = (
    "the engine never releases the lock of a hit that is aborted before it ran; ours does, and the "
    "replay holds one in its place, so that all events can be compared"
)
UNLOCKED = "the engine goes on over rows that nobody had locked and that are gone; ours never does"
SAMPLE = 900  # what a prefill appends if the file does not say
LEVELS = {
    **dict.fromkeys(
        ("free_kv", "free_states", "kv_evictable", "kv_locked", "state_evictable", "state_locked",
         "tree", "kv_evicted", "states_evicted", "kv_returned", "states_returned",
         "already_cached_tokens", "state_already_there", "duplicate_kv_freed"),
        Level.SHAPE,
    ),
    **dict.fromkeys(
        ("kv", "state", "state_copy_from", "work_slot", "tracked_slot", "slot", "given_kv",
         "given_state", "free_state_slots", "state_lru_newest_first", "kv_leaves_evict_first"),
        Level.EXACT,
    ),
}  # fmt: skip


def replay(scenario: Mapping[str, Any], level: Level) -> Verdict:
    """One file. The config that the engine refused must be refused here, too."""
    names = (scenario["name"], scenario["engine"], level.name.lower())
    try:
        driver = Driver(scenario["config"])
    except ValueError as error:
        want = {"error": scenario["construct"].get("error", "absent")}
        refused = {"error": {"type": "AssertionError", "kind": _config_fault(error)}}
        found = first_difference(want, refused, level, LEVELS)
        status = Status.DIFFERS if found else Status.OK
        return Verdict(*names, status, None, *(found or ()))
    found = first_difference(scenario["construct"], driver.construct(), level, LEVELS)
    if found:
        return Verdict(*names, Status.DIFFERS, None, *found)
    verdict = compare(scenario, driver.observe, level, LEVELS, abort_at(scenario), ABORTS)
    if verdict.status is Status.OK and driver.leaks:
        return verdict._replace(event=driver.leaks[0], field=LEAKS)
    return verdict


def abort_at(scenario: Mapping[str, Any]) -> int | None:
    """The event at which the engine's process would have ended; None if it lives to the end.
    ValueError if the tag says that it ended and no event does."""
    if "engine_abort" not in scenario.get("tags", ()):
        return None
    ended = next((i for i, seen in enumerate(scenario["observed"]) if _has_abort(seen)), None)
    if ended is None:
        raise ValueError("the tag engine_abort is there, but no event has an exception")
    return ended


def _has_abort(seen: Any) -> bool:
    if isinstance(seen, list):
        return any(_has_abort(part) for part in seen)
    if not isinstance(seen, dict):
        return False
    error = seen.get("error")
    own = error is not None and error["type"] != "None"
    return own or any(_has_abort(part) for part in seen.values())


def _config_fault(error: ValueError) -> str:
    one = "pages of one token" in str(error)
    return "page_must_be_1_without_extra_buffer" if one else "assertion"


class Refused(Exception):
    """The cache said not now: an ordinary answer where the engine's process would have ended."""


class Driver:
    """One cache of the size and kind that a file's config names, and the requests in it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.page = config["page_tokens"]
        sizes = Sizes(self.page, row_bytes=1, slot_bytes=1)
        storage = one_of_each(
            sizes,
            config["state_slots"],
            config["kv_tokens"] // self.page,
            newest_page_first=self.page > 1,  # the engine has another allocator for pages
        )
        cap = config.get("max_states_per_path", -1)
        self.cache = SGLangCache(
            storage,
            strategy=Strategy(config["strategy"]),
            state_chunk=config["state_chunk_tokens"],
            interval=config["track_interval"],
            path_cap=None if cap == -1 else cap,
            two_tracks=config.get("two_track_slots", True),
            reuse=config.get("caching", True),
        )
        self.tree = self.cache.tree
        self.kv, self.states = storage.pages[0], storage.states[0]
        self.executor = NullExecutor(storage)
        self.leases: dict[str, RadixLease] = {}
        self.receipts: dict[str, Receipt] = {}
        self.driven = 0  # events so far
        self.leaks: list[int] = []  # those at which the engine would have lost a lock
        self.unlocked: dict[str, Node] = {}  # where requests came in without a lock
        self.node: Node = self.tree.root  # of the last match or insert
        self.matched: list[int] = []  # its pages

    def construct(self) -> dict[str, Any]:
        return {
            "checkpoint_grid": self.cache.grids.checkpoint,
            "track_grid": self.cache.grids.track,
            "free_kv": self.kv.free_count * self.page,
            "free_states": self.states.free_count,
        }

    def observe(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Do what an event says; what it did, in the file's words. ValueError for an event that
        there is none of."""
        arguments = {name: value for name, value in event.items() if name != "op"}
        do = getattr(self, f"_do_{event['op']}", None)
        if do is None:
            raise ValueError(f"there is no event {event['op']!r}")
        own = event.get("id")
        self._lock_again(own)
        try:
            result = do(**arguments)
        except Refused as wait:
            result = {"error": {"type": "Wait", "kind": str(wait)}}
        self._lock_again(*self.unlocked)
        self.cache.audit()
        self._unlock_again()
        self.driven += 1
        return result | self._books()

    def _lock_again(self, *ids: str | None) -> None:
        """Our requests hold what they resume from; one that came in without a lock does so during
        its own events alone, and not the state, which it has copied."""
        for id in self.unlocked.keys() & {*ids} & self.leases.keys():
            lease, node = self.leases[id], self.unlocked[id]
            if lease.receipt is None or lease.receipt in self.tree.receipts:
                continue
            if not node.is_root:
                lease.receipt = self.tree.lock(node, state=False)
            elif lease.ran:
                raise Incomparable(UNLOCKED)
            else:
                lease.receipt, lease.published = None, 0
                lease.pages[0].clear()

    def _unlock_again(self) -> None:
        for id, node in [*self.unlocked.items()]:
            lease = self.leases.get(id)
            if lease is None or (lease.receipt is not None and lease.receipt.node is not node):
                del self.unlocked[id]  # it has ended, or has published and locked that
            elif lease.receipt is not None:
                self.tree.unlock(lease.receipt)

    # tree events

    def _do_match(self, tokens: list[int], limit: int | None = None, salt: str | None = None):
        match = self.tree.match(tokens[:limit], salt)
        hit = self.cache.hit_of(match, len(tokens))
        self.node, self.matched = match.node, match.pages
        seen = {
            "matched_tokens": match.depth,
            "kv_hit_tokens": match.kv_depth,
            "branching_tokens": hit.junction,
            "state": match.node.state,
        }
        return seen | ({"kv": self._slots(match.pages)} if match.depth else {})

    def _do_insert(
        self,
        tokens: list[int],
        state: bool = True,
        owned_tokens: int = 0,
        salt: str | None = None,
    ):
        count = len(tokens) // self.page
        owned = self.matched[: min(count, owned_tokens // self.page)]
        fresh = self.kv.alloc(count - len(owned))
        if fresh is None:
            return {"error": {"type": "None", "kind": "kv_pool_exhausted"}}
        slots = self.states.alloc(1) if state else [None]
        if slots is None:
            self.kv.free(fresh)
            return {"error": {"type": "None", "kind": "state_pool_exhausted"}}
        pages, free = [*owned, *fresh], self.kv.free_count
        if not state and count:
            self.kv.free(fresh)
            raise Refused("an insert without a state")
        own = len(owned) * self.page
        done = self.tree.insert(tokens, pages, slots[0], owned=own, salt=salt)
        if done.refused and state:
            self.states.free(slots)
        self.node = done.node
        if count:
            self.executor.place(self.tree.pages_of(done.node), done.node.state, tokens, salt)
        return {
            "given_kv": self._slots(pages),
            "given_state": slots[0],
            "already_cached_tokens": done.already,
            "state_already_there": done.refused,
            "duplicate_kv_freed": (self.kv.free_count - free) * self.page,
        }

    def _do_lock(self, name: str, kv_only: bool = False):
        self.receipts[name] = self.tree.lock(self.node, state=not kv_only)
        return {}

    def _do_unlock(self, name: str, keep: bool = False):
        try:
            self.tree.unlock(self.receipts[name])
        except (KeyError, OwnershipError):
            raise Refused("unlock_without_lock") from None
        if not keep:
            del self.receipts[name]
        return {}

    def _do_evict_kv(self, tokens: int):
        return self._evicted(self.tree.evict_kv(tokens))

    def _do_evict_state(self, states: int):
        return self._evicted(self.tree.evict_states(states))

    def _do_evict_for_alloc(self, kv: int = 0, states: int = 0):
        pages = self.kv.free_count + -(-kv // self.page) if kv else 0
        slots = self.states.free_count + states if states else 0
        return self._evicted(self.tree.evict_until(pages, slots))

    @staticmethod
    def _evicted(freed):
        return {"kv_evicted": freed.tokens, "states_evicted": freed.states}

    # request events

    def _do_admit(self, id: str, tokens: list[int], lock: bool = True):
        with self._step():
            lease = self.cache.admit(CacheRequest(id, tokens))
        if isinstance(lease, Wait):
            raise Refused(str(lease.reason))
        self.leases[id] = lease
        copy = next((c for c in lease.copies if c.kind is CopyKind.STATE), None)
        if not lock and lease.receipt is not None:
            self.unlocked[id] = lease.receipt.node
            self.executor.copy(lease.copies)  # its source may be gone when the first piece runs
            lease.copies = ()
        return {
            "matched_tokens": lease.hit.joint,
            "branching_tokens": lease.hit.junction,
            "state_copy_from": copy and copy.source,
            "work_slot": copy and copy.destination,
        }

    def _do_prefill(
        self,
        id: str,
        chunk: int | None = None,
        sample: int = SAMPLE,
        finish: bool = False,
        if_needed: bool = False,
    ):
        lease = self._lease(id)
        prompt = len(lease.request.ids)
        if if_needed and lease.computed >= prompt:
            return {"skipped": True}
        if id in self.unlocked and lease.receipt is None:
            raise Incomparable(UNLOCKED)
        with self._step():
            plan = self._plan(lease, chunk or lease.remaining)
            done = plan.end == prompt
            tracked = self._tracked(plan)
            self._commit(plan, [sample] if done else [], last=finish and done)
        seen = {"chunk": [plan.start, plan.end], **tracked}
        if finish and done:
            seen |= self._do_finish(id)
        return seen | {"published_tokens": lease.published}

    def _do_decode(self, id: str, tokens: list[int]):
        lease, tracked = self._lease(id), []
        for token in tokens:
            with self._step():
                copies = self._commit(self._plan(lease, 1), [token])
            tracked += [{"at": lease.computed, "slot": copy.destination} for copy in copies]
        return {"computed_tokens": lease.computed, "tracked": tracked}

    def _do_finish(self, id: str):
        return self._ended(id, self.cache.finish)

    def _do_abort(self, id: str):
        lease = self._lease(id)
        if lease.receipt is not None and not lease.ran and id not in self.unlocked:
            self.tree.lock(lease.receipt.node, state=lease.receipt.state)
            self.leaks.append(self.driven)
        return self._ended(id, self.cache.abort)

    def _ended(self, id: str, end):
        lease = self._lease(id)
        computed = lease.computed if lease.ran else 0  # restored is not computed
        kv, states = self.kv.free_count, self.states.free_count
        end(self.leases.pop(id))
        return {
            "computed_tokens": computed,
            "kv_returned": (self.kv.free_count - kv) * self.page,
            "states_returned": self.states.free_count - states,
        }

    def _do_request(self, id: str, tokens: list[int], sample: list[int], chunk: int | None = None):
        seen: dict[str, Any] = {"admit": self._do_admit(id, tokens), "prefill": []}
        while self._lease(id).computed < len(tokens):
            seen["prefill"].append(self._do_prefill(id, chunk, sample[0]))
        if sample[1:]:
            seen["decode"] = self._do_decode(id, sample[1:])
        return seen | {"finish": self._do_finish(id)}

    def _do_reset(self):
        self._lock_again(*self.unlocked)
        for lease in self.leases.values():
            self.cache.abort(lease)
        self.leases.clear()
        self.receipts.clear()
        self.unlocked.clear()
        self.cache.clear()
        self.node, self.matched = self.tree.root, []
        return {}

    def _lease(self, id: str) -> RadixLease:
        if id not in self.leases:
            raise Refused("this request was refused before")
        return self.leases[id]

    def _step(self):
        return _Step(self.cache)

    def _plan(self, lease: RadixLease, want: int) -> StepPlan:
        plan = self.cache.plan(lease, want)
        if isinstance(plan, Wait):
            if lease.request.name in self.unlocked:
                raise Incomparable(UNLOCKED)  # room is where its own rows are
            raise Refused(str(plan.reason))
        return plan

    def _commit(self, plan: StepPlan, appended: list[int], last: bool = False):
        self.executor.run([plan])
        copies = self.cache.commit(plan.lease, plan.end, appended, last=last)
        self.executor.copy(copies)
        return copies

    def _tracked(self, plan: StepPlan) -> dict[str, int | None]:
        if not plan.lease.tracker.limit:
            return {}
        for export in plan.exports:
            return {"tracked_at": plan.start + export.offset, "tracked_slot": export.slots[0]}
        return {"tracked_at": None, "tracked_slot": None}

    # books

    def _books(self) -> dict[str, Any]:
        ledger = self.tree.ledger()
        nodes = list(self.tree.nodes())
        number = {node: i for i, node in enumerate(nodes)}
        return {
            "free_kv": self.kv.free_count * self.page,
            "free_states": self.states.free_count,
            "free_state_slots": list(self.states.allocator.free_order()),
            "kv_evictable": ledger.kv_evictable,
            "kv_locked": ledger.kv_protected,
            "state_evictable": ledger.state_evictable,
            "state_locked": ledger.state_protected,
            "tree": [self._node(node, number) for node in nodes],
            "state_lru_newest_first": [number[node] for node in self.tree.state_order][::-1],
            "kv_leaves_evict_first": [number[node] for node in self.tree.leaves],
        }

    def _node(self, node: Node, number: Mapping[Node, int]) -> dict[str, Any]:
        tokens = keys.decode(node.key)
        return {
            "node": number[node],
            "parent": number.get(node.parent),
            "from": node.depth - len(tokens),
            "to": node.depth,
            "first_token": tokens[0],
            "last_token": tokens[-1],
            "kv": self._slots(node.pages),
            "state": node.state,
            "kv_locks": node.kv_locks,
            "state_locks": node.state_locks,
        } | ({} if node.salt is None else {"salt": node.salt})

    def _slots(self, pages: list[int]) -> list[int]:
        """The engine's own numbers of latent rows."""
        return [page * self.page + i for page in pages for i in range(self.page)]


class _Step:
    """begin_step .. end_step, also when a call in between was refused."""

    def __init__(self, cache: SGLangCache) -> None:
        self.cache = cache

    def __enter__(self) -> None:
        self.cache.begin_step()

    def __exit__(self, *_: object) -> None:
        self.cache.end_step()
