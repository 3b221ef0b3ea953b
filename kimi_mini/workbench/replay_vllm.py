"""vLLM's golden scenarios through the block manager under the engine's rules, run by the null
executor and audited after each event."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from cache.blocks.groups import Group, StateGroup
from cache.blocks.lease import BlockLease
from cache.blocks.vllm import STATES, VLLMCache
from cache.leases import CacheRequest, StepPlan, Wait, WaitReason
from cache.null_executor import NullExecutor
from cache.pools.pool import Pool
from cache.pools.storage import Storage
from kimi_mini.workbench.replay import (
    Level,
    Status,
    Verdict,
    compare,
    first_difference,
)

ABORTS = "the engine's process ends here; ours waits or refuses"
MISTAKEN = "the engine registers a state for more tokens than it has seen; ours never does"
TOO_EARLY = "the engine copies rows that this step has yet to write; ours waits for its end"
KINDS = ("mla", "full_attention", STATES)
LIMIT = 4096  # the largest chunk, if the file does not say
LEVELS = dict.fromkeys(
    ("hit_blocks", "new_blocks", "tables", "freed_tables", "registered", "dropped", "entries",
     "registered_total", "dropped_total", "free_blocks", "free_order", "refs", "copies"),
    Level.SHAPE,
)  # fmt: skip
FAULTS = {
    "state mode": ("AssertionError", "state_mode_needs_align"),
    "no state group": ("ValueError", "retention_without_state_group"),
    "retention interval": ("ValueError", "bad_retention_interval"),
    "hash unit": ("ValueError", "bad_hash_unit"),
}  # by what our message says
PROMISE = re.compile(r"entry g(\d+) block (\d+) promises (\d+) tokens")
TABLES = {"hit_blocks", "new_blocks", "tables", "freed_tables"}
ENTRIES = {"registered", "dropped", "registered_total", "dropped_total"}
Entry = tuple[int, int, int, str]  # group, block, prefix tokens, prefix of


def replay(scenario: Mapping[str, Any], level: Level) -> Verdict:
    """One file. The config that the engine refused must be refused here, too."""
    names = (scenario["name"], scenario["engine"], level.name.lower())
    try:
        driver = Driver(scenario["config"])
        built = driver.construct()
    except ValueError as error:
        built = {"error": _fault(error)}
    found = first_difference(scenario["construct"], built, level, LEVELS)
    if found:
        return Verdict(*names, Status.DIFFERS, None, *found)
    if "error" in built:
        return Verdict(*names, Status.OK)
    cut, reason = cut_of(scenario)
    observe = driver.observe
    if level is not Level.EXACT:
        scenario = {**scenario, "observed": [shape_of(seen) for seen in scenario["observed"]]}
        observe = lambda event: shape_of(driver.observe(event))  # noqa: E731
    return compare(scenario, observe, level, LEVELS, cut, reason)


def _fault(error: ValueError) -> dict[str, str]:
    for words, (type, kind) in FAULTS.items():
        if words in str(error):
            return {"type": type, "kind": kind}
    raise error


def cut_of(scenario: Mapping[str, Any]) -> tuple[int | None, str]:
    """The event from which on nobody should do as the engine did, None if there is none; why. It
    follows from the file alone, whatever ours does."""
    seen, tags = scenario["observed"], scenario.get("tags", ())
    groups = enumerate(scenario["config"]["groups"])
    rows = {number: group["block_tokens"] for number, group in groups if group["kind"] != STATES}
    cuts = [(_first(seen, partial(_copies_too_early, rows=rows)), TOO_EARLY)]
    if "engine_abort" in tags:
        cuts.append((_first(seen, _aborts), ABORTS))
    if "engine_defect" in tags or "unclipped" in tags:
        promises = map(PROMISE.search, scenario["content_mismatches"])
        wrong = {tuple(map(int, promise.groups())) for promise in promises if promise}
        cuts.append((_first(seen, partial(_registers, wrong=wrong)), MISTAKEN))
    found = [(event, reason) for event, reason in cuts if event is not None]
    return min(found, key=lambda cut: cut[0], default=(None, ""))


def _first(seen: Iterable[Any], holds: Callable[[Mapping[str, Any]], bool]) -> int | None:
    return next((i for i, one in enumerate(seen) if any(map(holds, _objects(one)))), None)


def _objects(seen: Any) -> Iterator[Mapping[str, Any]]:
    """Every object in an observation, at any depth."""
    if isinstance(seen, dict):
        yield seen
    for part in seen.values() if isinstance(seen, dict) else seen if isinstance(seen, list) else ():
        yield from _objects(part)


def _aborts(seen: Mapping[str, Any]) -> bool:
    return "error" in seen and seen["error"]["type"] != "None"


def _registers(seen: Mapping[str, Any], wrong: set[tuple[int, ...]]) -> bool:
    entries = seen.get("registered", ())
    return any((e["group"], e["block"], e["prefix_tokens"]) in wrong for e in entries)


def _copies_too_early(seen: Mapping[str, Any], rows: Mapping[int, int]) -> bool:
    """Whether it is a step with a hit that ends inside a block of rows, of which an item before it
    has some below the hit written: by its piece or, in a block that is new, by a copy, and all
    copies of a step read before any writes. rows: block size of each attention group, by number."""
    work = [item for item in seen.get("work", ()) if item["status"] == "scheduled"]
    for i, item in enumerate(work):
        hit = item.get("hit_tokens", 0)
        for number in (number for number, block in rows.items() if hit % block):
            tail = item["hit_blocks"][number][-1]
            for other in work[:i]:
                new = tail in other["new_blocks"][number]
                if new or (tail in other["tables"][number] and other["chunk"][0] < hit):
                    return True
    return False


def shape_of(seen: Any) -> Any:
    """An observation without block ids: of tables the null pattern, of entries what they are for,
    of copies their number, of reference counts the counts, and no order."""
    if isinstance(seen, list):
        return [shape_of(part) for part in seen]
    if not isinstance(seen, dict):
        return seen
    shape = {key: shape_of(value) for key, value in seen.items() if key != "free_order"}
    for key in TABLES & shape.keys():
        shape[key] = [[block is not None for block in table] for table in shape[key]]
    for key in ENTRIES & shape.keys():
        fields = ("group", "prefix_of", "prefix_tokens")
        shape[key] = sorted([entry[field] for field in fields] for entry in shape[key])
    if "copies" in shape:
        shape["copies"] = len(shape["copies"])
    if "refs" in shape:
        shape["refs"] = sorted(shape["refs"].values())
    return shape


class Driver:
    """One cache of the size and kind that a file's config names, and the requests in it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        kinds = [group["kind"] for group in config["groups"]]
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise ValueError(f"there is no group of kind {unknown[0]!r}; there are {KINDS}")
        blocks = [group["block_tokens"] for group in config["groups"]]
        size, self.caching = config["num_blocks"] - 1, config.get("caching", True)
        both = [*zip(kinds, blocks, strict=True)]
        rows = [block for kind, block in both if kind != STATES]
        states = [block for kind, block in both if kind == STATES]
        storage = Storage(
            tuple(Pool(size, "page", block) for block in rows),
            tuple(rows),
            tuple(Pool(size, "slot", 1) for _ in states),
        )
        exports = config.get("inner_checkpoint", False)
        self.cache = VLLMCache(
            storage,
            kinds=kinds,
            rows_at_once=True,
            state_block=states,
            hash_unit=config["hash_unit"] if self.caching else None,
            retention=config["retention_interval"],
            reuse=self.caching,
            state_mode=config["state_mode"],
            inner_checkpoint=config.get("inner_checkpoint_alignment") if exports else None,
        )
        (self.pool,) = {*self.cache.block_pools}
        limit = config.get("max_chunk_tokens")
        self.limit = LIMIT if limit is None else limit
        self.executor = NullExecutor(storage)
        self.requests: dict[str, CacheRequest] = {}  # with all tokens that are known
        self.leases: dict[str, BlockLease] = {}  # of those that hold anything
        self.prefixes: dict[bytes, tuple[str, int]] = {}  # whose first tokens have this hash

    @property
    def unit(self) -> int:
        return self.cache.sizes.unit if self.caching else self.cache.sizes.scheduler

    def construct(self) -> dict[str, Any]:
        return {
            "scheduling_block": self.cache.sizes.scheduler,
            "hash_unit": self.unit,
            "partial_block_hits": self.caching and self.cache.sizes.partial_hits,
            "free_blocks": self.pool.free_count,
        }

    def observe(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Do what an event says; what it did, in the file's words. ValueError for an event that
        there is none of."""
        arguments = {name: value for name, value in event.items() if name != "op"}
        do = getattr(self, f"_do_{event['op']}", None)
        if do is None:
            raise ValueError(f"there is no event {event['op']!r}")
        before = self._entries()
        seen = do(**arguments)
        self.cache.audit()
        self._check_states()
        after = self._entries()
        seen["entries"] = len(after)
        if event["op"] in ("request", "lookup"):
            return seen
        queue = list(self.pool.queue)
        return {
            **seen,
            "registered_total": self._told(after - before),
            "dropped_total": self._told(before - after),
            "free_blocks": len(queue),
            "free_order": queue,
            "refs": {str(block.id): block.refs for block in self.pool.blocks if block.refs},
        }

    def _check_states(self) -> None:
        """What is registered is the state that it is registered as."""
        for number, block, boundary, name in self._entries():
            group = self.cache.groups[number]
            if isinstance(group, StateGroup):
                held = self.executor.boundary_at(block, group.index)
                assert held == boundary, f"{name} at {boundary} is in {block}, which holds {held}"

    # events

    def _do_request(
        self, id: str, tokens: list[int], salt: str | None = None, skip_read: bool = False
    ) -> dict[str, Any]:
        count = len(tokens)
        self.requests[id] = CacheRequest(id, tokens, salt, skip_read, prompt=count)
        self._remember(id)
        return {"prompt_tokens": count, "hash_blocks": count // self.unit}

    def _do_step(self, work: list[Mapping[str, Any]]) -> dict[str, Any]:
        done, copies = self._step(work)
        return {"work": done, "copies": copies}

    def _do_run(self, id: str, sample: list[int], max_chunk: int | None = None) -> dict[str, Any]:
        """All known tokens; then each sampled one in a step of its own, but for the last."""
        steps: list[dict[str, Any]] = []
        if sample and not self._left(id):
            self._append(id, sample[:1])
            self.leases[id].tokens += sample[:1]  # no commit is due that could take it
            if len(sample) == 1:
                return {"steps": []}
            sample = sample[1:]
        while self._left(id):
            known = len(self.requests[id].ids)
            (item,), copies = self._step([{"id": id, "budget": max_chunk, "sample": sample[:1]}])
            steps.append(item | ({"copies": copies} if copies else {}))
            if item["status"] != "scheduled":
                break
            if item["chunk"][1] == known:
                sample = sample[1:]
                if not sample:
                    break
        return {"steps": steps}

    def _do_finish(self, id: str) -> dict[str, Any]:
        return self._ended(id, self.cache.finish)

    def _do_preempt(self, id: str) -> dict[str, Any]:
        return self._ended(id, self.cache.preempt)

    def _ended(self, id: str, end: Callable[[BlockLease], None]) -> dict[str, Any]:
        tables = self._tables(id)
        if id in self.leases:
            end(self.leases.pop(id))
        return {"freed_tables": tables}

    def _do_lookup(self, tokens: list[int], salt: str | None = None) -> dict[str, Any]:
        request = CacheRequest("lookup", tokens, salt)
        seen = self._hit(request)
        if len(seen["hit_blocks"]) > 1:
            chain = self.cache.chain_of(tokens, salt)
            limit = len(tokens) - 1 if self.caching else 0
            seen["hit_tokens_per_group"] = list(self.cache.coordinator.alone(chain, limit))
        return seen

    def _do_drop_blocks(self, blocks: list[int]) -> dict[str, Any]:
        for block in blocks:
            self.pool.forget(self.pool.blocks[block])
        return {}

    def _do_reset(self) -> dict[str, Any]:
        idle = not self.leases
        if idle:
            self.cache.clear()
        return {"ok": idle}

    # one step

    def _step(self, work: list[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict]]:
        """All allocations, then all copies, then all chunks, then what was sampled."""
        plans: list[tuple[StepPlan, list[int]]] = []
        self.cache.begin_step()
        done = [self._item(plans, **item) for item in work]
        copies = self._copies([plan for plan, _ in plans])
        self.executor.run([plan for plan, _ in plans])
        for plan, sample in plans:
            sample = sample if plan.end == len(plan.lease.tokens) else []
            self.executor.copy(self.cache.commit(plan.lease, plan.end, sample))
            self._append(plan.lease.request.name, sample)
        self.cache.end_step()
        return done, copies

    def _item(
        self,
        plans: list[tuple[StepPlan, list[int]]],
        id: str,
        budget: int | None = None,
        clip: bool = True,
        must_fit: bool = False,
        sample: list[int] | None = None,
        exact: int | None = None,
    ) -> dict[str, Any]:
        seen: dict[str, Any] = {"id": id}
        lease, due = self.leases.get(id), id not in self.leases
        if due:
            request = replace(self.requests[id], must_fit=must_fit)
            seen |= self._hit(request)
            lease = self.cache.admit(request)
        self.cache.clips = clip and exact is None
        most = self.limit if exact is None else exact
        budget = most if budget is None else budget
        want = min(lease.remaining, budget, most) if exact is None else exact
        start, before, entries = lease.computed, self._tables(id), self._entries()
        if due:
            before = seen["hit_blocks"]
        end = self.cache.end_of_piece(lease, want, most) if want else start
        plan = self.cache.plan(lease, want, most) if want else Wait(WaitReason.CHUNK)
        waits = isinstance(plan, Wait)
        if waits and due:
            self.cache.abort(lease)
        elif due:
            self.leases[id] = lease
        seen["chunk"] = [start, end]
        if waits and plan.reason is WaitReason.CHUNK:
            return seen | {"status": "waits"}
        after, now = self._tables(id), self._entries()
        seen |= {
            "status": "no_space" if waits else "scheduled",
            "tables": after,
            "registered": self._told(now - entries),
            "dropped": self._told(entries - now),
            "free_blocks": self.pool.free_count,
        }
        if waits:
            return seen
        plans.append((plan, sample or []))
        return seen | {"new_blocks": [_new(*tables) for tables in zip(before, after, strict=True)]}

    def _hit(self, request: CacheRequest) -> dict[str, Any]:
        found, hit = self.cache.find(request), self.cache.lookup(request)
        return {
            "hit_tokens": hit.joint,
            "junction_tokens": hit.junction or 0,
            "hit_blocks": [[block and block.id for block in columns] for columns in found.columns],
        }

    def _copies(self, plans: list[StepPlan]) -> list[dict[str, int]]:
        """Those that the scheduler plans, group by group: what has both ends in a table is the
        worker's own."""
        return [
            {"from": copy.source, "to": copy.destination}
            for group in self.cache.groups
            for plan in plans
            for copy in plan.copies
            if (copy.kind, copy.group) == (group.kind, group.index)
            and not {copy.source, copy.destination} <= {*self._table(group, plan.lease)}
        ]

    # books

    def _left(self, id: str) -> int:
        """Known tokens that are not computed."""
        lease = self.leases.get(id)
        return len(self.requests[id].ids) if lease is None else lease.remaining

    def _append(self, id: str, tokens: list[int]) -> None:
        request = self.requests[id]
        self.requests[id] = replace(request, ids=(*request.ids, *tokens))
        self._remember(id)

    def _remember(self, id: str) -> None:
        request = self.requests[id]
        chain = self.cache.chain_of(request.ids, request.salt)
        for boundary in range(chain.unit, chain.reach + 1, chain.unit):
            self.prefixes.setdefault(chain.at(boundary), (id, boundary))

    def _tables(self, id: str) -> list[list[int | None]]:
        """The block table of each group."""
        lease = self.leases.get(id)
        return [[] if lease is None else self._table(group, lease) for group in self.cache.groups]

    @staticmethod
    def _table(group: Group, lease: BlockLease) -> list[int | None]:
        """None for a column without a block."""
        table = group.table(lease)
        if not isinstance(group, StateGroup):
            return [block.id for block in table.blocks]
        cells = [table.columns.get(column) for column in range(table.length)]
        return [next(iter(cell.entries.values())).id if cell else None for cell in cells]

    def _entries(self) -> set[Entry]:
        entries = set()
        for key, boundary, block in self.pool.entries():
            name, length = self.prefixes[key[:-4]]
            assert length == boundary, f"a key for {boundary} tokens is that of {length}"
            entries.add((int.from_bytes(key[-4:], "big"), block.id, boundary, name))
        return entries

    @staticmethod
    def _told(entries: set[Entry]) -> list[dict[str, Any]]:
        return [
            {"group": group, "block": block, "prefix_of": name, "prefix_tokens": boundary}
            for group, block, boundary, name in sorted(entries)
        ]


def _new(before: list[int | None], after: list[int | None]) -> list[int | None]:
    """Columns appended or replaced; one that was given back is not replaced."""
    replaced = [new for old, new in zip(before, after, strict=False) if new not in (old, None)]
    return replaced + after[len(before) :]
