"""vLLM's golden scenarios: what the engine did is what ours does, to the last block."""

import copy
import json
from pathlib import Path

import pytest

from kimi_mini.workbench.replay import Level, Status, replay_file
from kimi_mini.workbench.replay_vllm import MISTAKEN, TOO_EARLY, Driver, cut_of, replay

FOLDER = Path(__file__).resolve().parents[2] / "golden" / "vllm"
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}
DEFECTS = {  # V26, and from which event on
    "inner_ckpt_resume_inside_block_dense": 4,
    "inner_ckpt_resume_inside_block_junction": 7,
}


def scenario(name):
    return json.loads(FILES[name].read_text("utf-8"))


def test_all_of_them_are_here():
    assert len(FILES) == 101 and FILES.keys() >= DEFECTS.keys()


@pytest.mark.parametrize("level", Level, ids=lambda level: level.name.lower())
@pytest.mark.parametrize("name", FILES)
def test_every_scenario_is_the_same_or_by_design_where_the_engine_is_wrong(name, level):
    verdict = replay(scenario(name), level)
    assert verdict[:3] == (name, "vllm 0.33.0", level.name.lower())
    if name in DEFECTS:
        assert verdict[3:6] == (Status.BY_DESIGN, DEFECTS[name], MISTAKEN)
    else:
        assert verdict[3:] == (Status.OK, None, None, None, None)


@pytest.mark.parametrize(
    "name, event, key", [("cold_miss", 1, "free_order"), ("multi_turn_retention0", 3, "entries")]
)
def test_a_replay_can_tell(name, event, key):
    told = copy.deepcopy(scenario(name))
    seen = told["observed"][event]
    seen[key] = seen[key][::-1] if isinstance(seen[key], list) else seen[key] + 1
    verdict = replay(told, Level.EXACT)
    assert (verdict.status, verdict.event) == (Status.DIFFERS, event)


# events and configs that no file here has; what is expected of them the engine has done


def rows(block, kind="mla"):
    return dict(kind=kind, block_tokens=block)


def states(block):
    return dict(kind="linear_state", block_tokens=block)


PAIR = [rows(4), states(4)]
CONFIG = dict(hash_unit=None, state_mode="align", retention_interval=None, num_blocks=24)
FIVE, SEVEN, TEN = ([*range(1, 1 + n)] for n in (5, 7, 10))


def request(id, tokens, **options):
    return dict(op="request", id=id, tokens=tokens, **options)


def step(*work):
    """work: (id, budget)"""
    return dict(op="step", work=[dict(id=id, budget=budget) for id, budget in work])


def run(id, sample=()):
    return dict(op="run", id=id, sample=[*sample])


def drop(*blocks):
    return dict(op="drop_blocks", blocks=[*blocks])


def lookup(tokens):
    return dict(op="lookup", tokens=tokens)


FINISH = dict(op="finish", id="a")


def made(events, groups=PAIR, **config):
    """A scenario in which ours has seen all events."""
    config = CONFIG | dict(groups=groups) | config
    driver = Driver(config)
    return dict(
        name="made",
        engine="vllm 0.33.0",
        config=config,
        construct=driver.construct(),
        events=events,
        observed=[driver.observe(event) for event in events],
    )


def seen(events, **config):
    """What the last of these events shows; of a step with one item, that item, too."""
    last = made(events, **config)["observed"][-1]
    return last | (last["work"][-1] if "work" in last else {})


ROWS = {
    "a piece is clipped to nothing before a state of this step is waited for": (
        [request("a", SEVEN), request("b", SEVEN), step(("a", 4), ("b", 1))],
        {},
        dict(hit_tokens=4, chunk=[4, 4], status="waits"),
    ),
    "one that is not waits as if there were no room": (
        [request("a", SEVEN), request("b", SEVEN), step(("a", 4), ("b", 3))],
        {},
        dict(hit_tokens=4, chunk=[4, 7], status="no_space", tables=[[], []], free_blocks=21),
    ),
    "a hit is not given up for want of room": (
        [request("a", TEN[:9]), step(("a", 8)), FINISH, request("b", [*range(1, 17)]),
         step(("b", None))],
        dict(num_blocks=5),
        dict(hit_tokens=8, chunk=[8, 12], status="no_space", free_order=[4, 2, 1, 3]),
    ),
    "what a single group registers is not floored to blocks": (
        [request("a", TEN[:6]), step(("a", None)), drop(1), step(("a", None))],
        dict(groups=[states(4)]),
        dict(chunk=[4, 6], registered=[], entries=0),
    ),
    "among several it is, and the end of the prompt comes again": (
        [request("a", TEN[:6]), step(("a", None)), drop(2), step(("a", None))],
        {},
        dict(chunk=[4, 6], entries=2,
             registered=[dict(group=1, block=2, prefix_of="a", prefix_tokens=4)]),
    ),
    "equal state groups are found together": (
        [request("a", FIVE), step(("a", 4)), drop(2), lookup(FIVE)],
        dict(groups=[rows(4), states(4), states(4)]),
        dict(hit_tokens=0, junction_tokens=4, hit_tokens_per_group=[4, 0, 0]),
    ),
    "attention groups of two kinds are not": (
        [request("a", FIVE), step(("a", 4)), drop(2), lookup(FIVE)],
        dict(groups=[rows(4), rows(4, "full_attention")]),
        dict(hit_tokens=0, junction_tokens=4, hit_tokens_per_group=[4, 0]),
    ),
    "of two kinds the second is asked for no more than the first has": (
        [request("a", TEN), *[step(("a", 4))] * 3, drop(4), lookup(TEN)],
        dict(groups=[rows(4), rows(8, "full_attention"), states(4)], hash_unit=2),
        dict(hit_tokens=0, junction_tokens=4, hit_tokens_per_group=[4, 8, 8]),
    ),
    "groups take their blocks in the order of the file": (
        [request("a", TEN[:9]), step(("a", None))],
        dict(groups=PAIR[::-1]),
        dict(chunk=[0, 8], tables=[[None, 1], [2, 3]], new_blocks=[[None, 1], [2, 3]]),
    ),
    "without caching every column has a block in state mode all": (
        [request("a", TEN[:9]), step(("a", None))],
        dict(state_mode="all", caching=False),
        dict(chunk=[0, 9], tables=[[1, 2, 3], [4, 5, 6]], entries=0),
    ),
    "the last token of a run is only appended, even if nothing was left to run": (
        [request("a", FIVE[:4]), run("a"), run("a", [9]), lookup([*FIVE[:4], 9, 10])],
        {},
        dict(hit_tokens=4, hit_blocks=[[1], [2]], entries=2),
    ),
    "a budget that is absent is no limit": (
        [request("a", SEVEN), dict(op="step", work=[dict(id="a")])],
        {},
        dict(chunk=[0, 4], status="scheduled"),
    ),
    "a budget of nothing is none": (
        [request("a", SEVEN), step(("a", 0))],
        {},
        dict(chunk=[0, 0], status="waits"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_what_the_engine_does_beyond_these_files(name):
    events, config, expected = ROWS[name]
    last = seen(events, **config)
    assert {key: last[key] for key in expected} == expected


# where a file is comparable no further


def copied_early(status="scheduled", tail=2):
    """Two requests in one step resume at 4 inside a block. The rows of the second hit are in the
    block into which the first one's are to be copied; the engine copies all at once."""
    pair, both = [rows(8), states(8)], [*range(1, 5), *range(11, 27)]
    events = [request("a", FIVE), run("a", [99]), FINISH, request("b", both), request("c", both)]
    told = made([*events, step(("b", None))], pair, hash_unit=4, retention_interval=0)
    told["events"][-1] = step(("b", None), ("c", None))
    second = dict(
        id="c", hit_tokens=4, junction_tokens=8, hit_blocks=[[tail], [3]], chunk=[4, 8],
        status=status, new_blocks=[[5], [6]], tables=[[5], [6]],
    )  # fmt: skip
    told["observed"][-1]["work"].append(second)
    return told


def written_early():
    """The rows of a hit at 12 are in a block of a running request that gets to 12 in this step;
    the state there is another's."""
    pair, long = [rows(8), states(8)], [*range(1, 31)]
    options = dict(hash_unit=4, retention_interval=0, max_chunk_tokens=5)
    events = [request("a", long[:13]), run("a"), FINISH, drop(3), request("b", long),
              step(("b", 3)), request("c", long)]  # fmt: skip
    told = made([*events, step(("b", 5))], pair, **options)
    assert told["observed"][-1]["work"][0]["chunk"] == [11, 16]
    told["events"][-1] = step(("b", 5), ("c", None))
    second = dict(
        id="c", hit_tokens=12, junction_tokens=16, hit_blocks=[[1, 4], [None, 5]], chunk=[12, 16],
        status="scheduled", new_blocks=[[7], [8]], tables=[[1, 7], [None, 8]],
    )  # fmt: skip
    told["observed"][-1]["work"].append(second)
    return told


@pytest.mark.parametrize("told", [copied_early(), written_early()], ids=["copied", "written"])
@pytest.mark.parametrize("level", Level, ids=lambda level: level.name.lower())
def test_rows_that_a_step_has_yet_to_write_are_waited_for_here(told, level):
    event = len(told["events"]) - 1
    assert replay(told, level)[3:6] == (Status.BY_DESIGN, event, TOO_EARLY)


@pytest.mark.parametrize("change", [dict(tail=1), dict(status="no_space")])
def test_a_wait_of_ours_is_no_excuse(change):
    """That it is by design follows from what the engine has read, not from the difference."""
    told = copied_early(**change)
    assert cut_of(told) == (None, "")
    verdict = replay(told, Level.EXACT)
    assert (verdict.status, verdict.event) == (Status.DIFFERS, 5)
    assert verdict.field.startswith("work[1].")


@pytest.mark.parametrize("name", DEFECTS)
def test_a_mistake_of_the_engine_must_be_marked_as_one(name):
    told = scenario(name)
    assert cut_of(told) == (DEFECTS[name], MISTAKEN)
    told["tags"].remove("engine_defect")
    verdict = replay(told, Level.EXACT)
    assert (verdict.status, verdict.event) == (Status.DIFFERS, DEFECTS[name])


# files of other people

ODD = {
    "another group kind": (dict(groups=[rows(4, "swa")]), "no group of kind 'swa'; there are"),
    "no group": (dict(groups=[]), "at least one token, got []"),
    "a block of nothing": (dict(groups=[rows(0), states(4)]), "at least one token, got (0,)"),
    "a block of text": (dict(groups=[rows("4"), states(4)]), "TypeError"),
    "a pool of nothing": (dict(num_blocks=1), "at least one page, got 0"),
    "exports at nothing": (
        dict(inner_checkpoint=True, inner_checkpoint_alignment=0),
        "inner_checkpoint must be at least 1 token",
    ),
}
UNKNOWN = {
    "another op": (dict(op="wave"), "there is no event 'wave'"),
    "a method that is no op": (dict(op="observe"), "there is no event 'observe'"),
    "an option that there is not": (request("z", FIVE, adapter="x"), "argument 'adapter'"),
    "nobody's step": (step(("nobody", 1)), "KeyError: 'nobody'"),
    "a step of nothing": (dict(op="step", work=None), "TypeError"),
    "a block that there is not": (drop(99), "IndexError"),
}


def judged(told, tmp_path):
    file = tmp_path / "odd.json"
    file.write_text(json.dumps(told))
    return replay_file(file, Level.SHAPE, dict(vllm=replay))


@pytest.mark.parametrize("what", ODD)
def test_a_config_that_is_none_differs_at_the_construction(what, tmp_path):
    config, words = ODD[what]
    told = made([])
    told["config"] |= config
    verdict = judged(told, tmp_path)
    assert (verdict.status, verdict.event) == (Status.DIFFERS, None)
    assert words in verdict.got and "\n" not in verdict.got


@pytest.mark.parametrize("what", UNKNOWN)
def test_an_event_that_is_none_differs_where_it_is(what, tmp_path):
    event, words = UNKNOWN[what]
    told = made([request("a", FIVE)])
    told["events"].append(event)
    told["observed"].append({})
    verdict = judged(told, tmp_path)
    assert (verdict.status, verdict.event) == (Status.DIFFERS, 1)
    assert words in verdict.got and "\n" not in verdict.got


@pytest.mark.parametrize(
    "config",
    [
        dict(max_chunk_tokens=None),
        dict(caching=True),
        dict(inner_checkpoint=False, inner_checkpoint_alignment=0),
        dict(inner_checkpoint=True),
        dict(inner_checkpoint=True, inner_checkpoint_alignment=None),
    ],
)
def test_an_option_that_says_nothing_changes_nothing(config):
    events = [request("a", SEVEN), run("a", [8, 9]), FINISH, lookup(TEN)]
    assert made(events, **config)["observed"] == made(events)["observed"]
