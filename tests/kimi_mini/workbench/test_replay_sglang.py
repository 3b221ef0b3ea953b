"""SGLang's golden scenarios: what the engine did is what ours does, and a replay can tell."""

import copy
import json
from pathlib import Path

import pytest

from kimi_mini.workbench.replay import Difference, Level, Status, first_difference
from kimi_mini.workbench.replay_sglang import (
    ABORTS,
    LEAKS,
    LEVELS,
    UNLOCKED,
    Driver,
    abort_at,
    replay,
)

FOLDER = Path(__file__).resolve().parents[2] / "golden" / "sglang"
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}
ABORTED = {
    "eb_state_exhausted": 3,
    "lock_unlock_twice": 4,
    "nb_kv_pressure": 5,
    "nb_state_exhausted": 3,
    "tree_insert_without_state": 0,
}
LEAKED = {"random_007": 27, "random_073": 31, "random_083": 34, "random_090": 33, "random_096": 45}


def scenario(name):
    return json.loads(FILES[name].read_text("utf-8"))


@pytest.mark.parametrize("name", FILES)
def test_every_scenario_is_the_same_to_the_last_slot_or_by_design_for_a_known_reason(name):
    verdict = replay(scenario(name), Level.EXACT)
    assert verdict[:3] == (name, "sglang 0.5.23", "exact")
    if name in ABORTED:
        assert verdict[3:6] == (Status.BY_DESIGN, ABORTED[name], ABORTS)
    elif name in LEAKED:
        assert verdict[3:] == (Status.OK, LEAKED[name], LEAKS, None, None)
    else:
        assert verdict[3:] == (Status.OK, None, None, None, None)


def test_these_are_all():
    assert len(FILES) == 98
    assert FILES.keys() >= ABORTED.keys() | LEAKED.keys()
    tagged = {name for name in FILES if "engine_abort" in scenario(name)["tags"]}
    assert tagged == ABORTED.keys()


# a lie in a file is found where it is, at the level that sees it

LIES = [
    # file, event, path to the value, a wrong value, the first level that sees it
    ("eb_branching_tracked", 1, ["branching_tokens"], 4, Level.TOKEN),
    ("nb_multi_turn_no_decode", 0, ["finish", "computed_tokens"], 99, Level.TOKEN),
    ("eb_cold", 0, ["prefill", 0, "tracked_at"], 4, Level.TOKEN),
    ("eb_cold", 0, ["prefill", 0, "published_tokens"], 4, Level.TOKEN),
    ("tree_two_branches", 0, ["state_already_there"], True, Level.SHAPE),
    ("tree_two_branches", 0, ["already_cached_tokens"], 1, Level.SHAPE),
    ("tree_two_branches", 1, ["free_kv"], 1, Level.SHAPE),
    ("tree_two_branches", 1, ["tree", 0, "to"], 1, Level.SHAPE),
    ("tree_two_branches", 1, ["tree", 0, "kv_locks"], 7, Level.SHAPE),
    ("tree_two_branches", 1, ["tree", 1, "state"], None, Level.SHAPE),
    ("tree_two_branches", 1, ["tree", 1, "state"], 7, Level.EXACT),
    ("tree_two_branches", 1, ["tree", 0, "kv"], [9, 9], Level.EXACT),
    ("tree_two_branches", 1, ["free_state_slots"], [1], Level.EXACT),
    ("tree_two_branches", 1, ["given_kv"], [1], Level.EXACT),
    ("evict_kv_lru_leaf", 2, ["kv_leaves_evict_first"], [1, 0], Level.EXACT),
    ("evict_kv_lru_leaf", 2, ["state_lru_newest_first"], [0, 1], Level.EXACT),
]


def put(value, path, lie):
    *way, last = path
    for step in way:
        value = value[step]
    assert value[last] != lie, "no lie"
    value[last] = lie


@pytest.mark.parametrize(
    "name, event, path, lie, first",
    LIES,
    ids=[f"{n} {p[-1]} {level.name}" for n, _, p, _, level in LIES],
)
def test_a_lie_is_found_from_its_level_on(name, event, path, lie, first):
    told = scenario(name)
    truth = copy.deepcopy(told)
    put(told["observed"][event], path, lie)
    field = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)[1:]
    for level in Level:
        verdict = replay(told, level)
        if level < first:
            assert verdict == replay(truth, level)
            assert verdict.status is Status.OK
        else:
            assert verdict.status is Status.DIFFERS
            assert verdict.event == event
            assert verdict.field == field or verdict.field.startswith(f"{field}[")


def test_levels_are_nested():
    """Whatever differs at a level differs at those above: no key is lost on the way up."""
    want = dict(matched_tokens=1, free_kv=2, kv=[3], tree=[dict(to=4, state=5)], state=None)
    for change in (
        dict(matched_tokens=9),
        dict(free_kv=9),
        dict(kv=[9]),
        dict(kv=None),
        dict(tree=[dict(to=9, state=5)]),
        dict(tree=[dict(to=4, state=None)]),
        dict(tree=[dict(to=4, state=9)]),
        dict(tree=[]),
        dict(state=1),
        dict(more=1),
    ):
        found = [
            first_difference(want, want | change, level, LEVELS) is not None for level in Level
        ]
        assert found == sorted(found) and found[-1], change


def test_a_key_that_is_missing_or_too_many_is_a_difference():
    for want, got, wrong in (
        (dict(a=1), dict(), Difference("a", 1, "absent")),
        (dict(), dict(a=1), Difference("a", "absent", 1)),
        (dict(a=[1, 2]), dict(a=[1]), Difference("a", [1, 2], [1])),
        (dict(a=dict(b=[dict(c=1)])), dict(a=dict(b=[dict(c=2)])), Difference("a.b[0].c", 1, 2)),
        (dict(a=None), dict(a=0), Difference("a", None, 0)),
    ):
        assert first_difference(want, got, Level.TOKEN, {}) == wrong


def test_shape_below_the_token_level_is_not_looked_at_even_where_it_is_missing():
    assert first_difference(dict(tree=[]), dict(), Level.TOKEN, LEVELS) is None
    assert first_difference(dict(kv=[1]), dict(), Level.TOKEN, LEVELS) == ("kv", [1], "absent")


# configs

CONFIG = dict(
    strategy="extra_buffer",
    page_tokens=1,
    state_chunk_tokens=4,
    track_interval=8,
    kv_tokens=32,
    state_slots=8,
)


def made(events, observed=None, tags=(), **config):
    """A scenario of ours: what our driver sees is what it says, if nothing is given."""
    config = CONFIG | config
    driver = Driver(config)
    construct = driver.construct()
    if observed is None:
        observed = [driver.observe(event) for event in events]
    return dict(
        name="made",
        engine="sglang 0.5.23",
        tags=list(tags),
        config=config,
        construct=construct,
        events=events,
        observed=observed,
    )


def test_a_config_that_the_engine_refused_is_refused_for_the_same_reason():
    refused = scenario("page4_no_buffer_refused")
    assert replay(refused, Level.EXACT).status is Status.OK
    refused["config"]["page_tokens"] = 1
    verdict = replay(refused, Level.TOKEN)
    assert (verdict.status, verdict.event, verdict.field) == (Status.DIFFERS, None, "error")


def test_a_config_that_is_refused_here_alone_differs():
    told = scenario("eb_cold")
    told["config"]["max_states_per_path"] = 0
    verdict = replay(told, Level.TOKEN)
    assert verdict[3:] == (
        *(Status.DIFFERS, None, "error", "absent"),
        dict(type="AssertionError", kind="assertion"),
    )


def test_derived_sizes_are_compared():
    told = scenario("eb_cold")
    told["construct"]["track_grid"] = 4
    verdict = replay(told, Level.TOKEN)
    assert (verdict.event, verdict.field, verdict.want, verdict.got) == (None, "track_grid", 4, 8)


# events that no file here has


def match(tokens, **options):
    return dict(op="match", tokens=tokens, **options)


def insert(tokens, **options):
    return dict(op="insert", tokens=tokens, **options)


def seen(events, **config):
    """What the last of these events shows."""
    return made(events, **config)["observed"][-1]


TEN = [*range(10)]
ADMIT = dict(op="admit", id="r", tokens=TEN)


def test_an_eviction_for_an_allocation_frees_that_much_more():
    """RULES S24: also where plenty is free; what goes along counts."""
    events = [insert(TEN[:4]), insert([50, 51, 52, 53]), insert([60, 61])]
    assert seen([*events, dict(op="evict_for_alloc", kv=5)])["kv_evicted"] == 8
    both = seen([*events, dict(op="evict_for_alloc", kv=1, states=2)])
    assert (both["kv_evicted"], both["states_evicted"]) == (8, 2)
    assert seen([*events, dict(op="evict_for_alloc", states=99)])["states_evicted"] == 3
    assert seen([*events, dict(op="evict_for_alloc")])["kv_evicted"] == 0


def test_a_lock_on_a_tombstone_keeps_the_state_that_comes():
    """RULES S19"""
    events = [
        insert(TEN[:2]),
        insert(TEN[:6]),
        match([0, 1, 9]),
        ADMIT,  # uses the other state, and keeps it
        dict(op="evict_state", states=1),
        dict(op="lock", name="a"),
    ]
    locked = seen(events)
    assert [(n["state"], n["state_locks"]) for n in locked["tree"]] == [(None, 1), (2, 1)]
    assert (locked["state_locked"], locked["state_evictable"]) == (1, 0)
    filled = seen([*events, insert(TEN[:2]), dict(op="evict_state", states=9)])
    assert (filled["state_locked"], filled["states_evicted"]) == (2, 0)


def test_a_key_shorter_than_a_page_inserts_nothing():
    for state in (True, False):
        short = seen([insert([1, 2, 3], state=state)], page_tokens=4)
        assert short["given_kv"] == [] and short["state_already_there"]
        assert (short["free_kv"], short["free_states"], short["tree"]) == (32, 8, [])


def test_an_insert_without_a_state_is_refused_with_all_given_back():
    """R30"""
    refused = seen([insert(TEN, state=False)])
    assert refused["error"] == dict(type="Wait", kind="an insert without a state")
    assert (refused["free_kv"], refused["tree"]) == (32, [])


def test_the_owned_part_of_an_insert_is_the_tree_s():
    events = [insert(TEN[:6]), match(TEN[:6]), insert(TEN, owned_tokens=6)]
    last = seen(events)
    assert last["given_kv"] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert (last["already_cached_tokens"], last["duplicate_kv_freed"]) == (6, 0)


def test_of_the_owned_part_only_what_was_matched_is_the_tree_s():
    """The rest is fresh, and where the tree has those rows, freed."""
    nothing = seen([insert(TEN[:6]), insert(TEN, owned_tokens=6)])
    assert nothing["given_kv"] == [*range(7, 17)]
    assert (nothing["duplicate_kv_freed"], nothing["free_kv"]) == (6, 22)
    less = [insert(TEN[:6]), match(TEN[:4]), insert(TEN[:4]), match(TEN[:4])]
    part = seen([*less, insert(TEN, owned_tokens=6)])
    assert part["given_kv"][:4] == [1, 2, 3, 4]
    assert (part["duplicate_kv_freed"], part["free_kv"]) == (2, 22)


def test_a_request_without_a_lock_does_not_keep_what_it_has_found():
    events = [insert(TEN[:8]), ADMIT | dict(lock=False)]
    found = seen(events)
    assert (found["matched_tokens"], found["state_copy_from"], found["work_slot"]) == (8, 1, 2)
    assert (found["kv_locked"], found["state_locked"], found["state_evictable"]) == (0, 0, 1)
    gone = seen([*events, dict(op="evict_kv", tokens=1)])
    assert (gone["kv_evicted"], gone["tree"], gone["free_states"]) == (8, [], 7)
    ended = seen([*events, dict(op="evict_kv", tokens=1), dict(op="abort", id="r")])
    assert (ended["computed_tokens"], ended["states_returned"]) == (0, 1)
    assert (ended["free_kv"], ended["free_states"]) == (32, 8)


def test_it_locks_what_it_publishes_and_runs_where_its_state_alone_has_gone():
    prefill = dict(op="prefill", id="r")
    events = [insert(TEN[:4]), insert(TEN[:8]), ADMIT | dict(lock=False, tokens=[*TEN, 10, 11, 12])]
    ran = seen([*events, prefill])
    assert (ran["chunk"], ran["published_tokens"], ran["kv_locked"]) == ([8, 13], 12, 12)
    lost = [insert(TEN[:4]), ADMIT | dict(lock=False), insert(TEN[:8])]
    ran = seen([*lost, dict(op="evict_state", states=1), prefill])
    assert ran["chunk"] == [4, 10] and ran["published_tokens"] == 8


def test_running_on_over_rows_that_are_gone_is_not_done():
    events = [insert(TEN[:8]), ADMIT | dict(lock=False), dict(op="evict_kv", tokens=1)]
    told = made(events)
    for event in (dict(op="prefill", id="r"), match(TEN)):
        told["events"].append(event)
        told["observed"].append({})
    verdict = replay(told, Level.EXACT)
    assert verdict[3:6] == (Status.BY_DESIGN, 3, UNLOCKED)


def test_nor_is_evicting_rows_that_run():
    """A piece below the grid publishes nothing, so the request still has no lock."""
    ran = dict(op="prefill", id="r", chunk=1)
    told = made([insert(TEN[:8]), ADMIT | dict(lock=False), ran])
    told["events"].append(dict(op="evict_kv", tokens=1))
    told["observed"].append({})
    assert replay(told, Level.EXACT)[3:6] == (Status.BY_DESIGN, 3, UNLOCKED)


def test_a_lock_that_the_engine_would_lose_is_held_in_its_place_and_remarked_on():
    """Without a tag everything is compared, and all of it is the same: ok, at the abort."""
    events = [insert(TEN[:8]), ADMIT, dict(op="abort", id="r"), dict(op="evict_kv", tokens=9)]
    told = made(events)
    assert told["observed"][-1]["kv_locked"] == 8 and told["observed"][-1]["kv_evicted"] == 0
    assert replay(told, Level.EXACT)[3:6] == (Status.OK, 2, LEAKS)
    told["observed"][-1]["kv_locked"] = 0
    assert replay(told, Level.EXACT)[3:6] == (Status.DIFFERS, 3, "kv_locked")


def test_after_a_reset_names_and_requests_are_gone():
    events = [
        insert(TEN[:8]),
        dict(op="lock", name="a"),
        ADMIT | dict(lock=False),
        dict(op="reset"),
    ]
    assert seen(events)["free_kv"] == 32
    undone = seen([*events, dict(op="unlock", name="a")])
    assert undone["error"]["kind"] == "unlock_without_lock"
    assert seen([*events, dict(op="decode", id="r", tokens=[1])])["error"]["type"] == "Wait"
    fresh = seen([*events, insert(TEN[:2], owned_tokens=2)])
    assert fresh["given_kv"] == [1, 2]


def test_events_after_an_abort_of_the_engine_are_driven_and_not_compared():
    told = scenario("nb_state_exhausted")
    assert abort_at(told) == 3
    told["events"].append(match(TEN))
    told["observed"].append({})
    assert replay(told, Level.EXACT).status is Status.BY_DESIGN
    told["observed"][1]["free_kv"] = 0
    assert replay(told, Level.SHAPE)[3:6] == (Status.DIFFERS, 1, "free_kv")


PREFILL = dict(op="prefill", id="r")
FAULTY = [
    # events before it, the event that cannot be driven, words
    ([], dict(op="defragment"), "ValueError: there is no event 'defragment'"),
    ([], match(TEN, deep=True), "unexpected keyword argument 'deep'"),
    ([], dict(op="match"), "missing 1 required positional argument: 'tokens'"),
    ([], insert([-1, 2]), "OverflowError"),
    ([], insert([1 << 32]), "OverflowError"),
    ([ADMIT, PREFILL, PREFILL], dict(op="decode", id="r", tokens=[1]), "ContractError: plan r: no"),
    (
        [ADMIT, PREFILL, PREFILL],
        PREFILL,
        "ValueError: want and max_chunk must be at least 1, got 0",
    ),
    ([ADMIT, dict(op="decode", id="r", tokens=TEN)], PREFILL | dict(chunk=-1), "ValueError"),
    ([], ADMIT | dict(tokens=[]), "ValueError: request r has no tokens"),
    ([], dict(op="request", id="r", tokens=TEN, sample=[]), "IndexError"),
    ([], dict(op="evict_kv", tokens="all"), "TypeError"),
]


@pytest.mark.parametrize("before, event, words", FAULTY, ids=[words for *_, words in FAULTY])
def test_an_event_that_cannot_be_driven_differs_where_it_is(before, event, words):
    told = made([*before])
    told["events"].append(event)
    told["observed"].append({})
    verdict = replay(told, Level.TOKEN)
    assert verdict[3:7] == (Status.DIFFERS, len(before), "error", "absent")
    assert words in verdict.got and "\n" not in verdict.got


def test_a_scenario_without_tags_has_no_cut():
    told = made([insert(TEN), match(TEN)])
    del told["tags"]
    assert abort_at(told) is None
    assert replay(told, Level.EXACT).status is Status.OK


def test_the_tag_of_an_abort_needs_one():
    told = made([insert(TEN)], tags=["engine_abort"])
    with pytest.raises(ValueError, match="no event has an exception"):
        replay(told, Level.TOKEN)


def test_an_invariant_of_ours_that_breaks_is_a_difference(monkeypatch):
    """Also behind the cut, where nothing is compared."""
    told = scenario("nb_state_exhausted")
    told["events"].append(dict(op="evict_kv", tokens=1))
    told["observed"].append({})

    def damaged(driver, tokens):
        driver.tree._kv_total += 1
        return {}

    monkeypatch.setattr(Driver, "_do_evict_kv", damaged)
    verdict = replay(told, Level.TOKEN)
    assert verdict[3:6] == (Status.DIFFERS, 4, "our own invariants")
    assert "I-27" in verdict.got
