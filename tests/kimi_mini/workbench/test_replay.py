"""Files of other people: whatever is in one, it has one verdict, which says where and what."""

import json
from pathlib import Path

import pytest

from kimi_mini.workbench.replay import Level, Status, Verdict, check_scenario, replay_file
from kimi_mini.workbench.replay_sglang import replay
from tests.scripts.running import in_this_process

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
GOOD = json.loads((GOLDEN / "sglang" / "tree_two_branches.json").read_text("utf-8"))


def judged(file, engines=(("sglang", replay),)):
    return replay_file(file, Level.SHAPE, dict(engines))


def without(key):
    return {name: value for name, value in GOOD.items() if name != key}


BAD = {
    "no JSON": ("{", "JSONDecodeError: Expecting"),
    "no UTF-8": (b'"\xff"', "UnicodeDecodeError"),
    "too deep": ("[" * 100_000, "RecursionError"),
    "a list": ([], "it lacks config, construct, engine, events, name, observed"),
    "a model's config": (dict(hidden_size=8), "it lacks config, construct, engine"),
    "no events": (without("events"), "it lacks events"),
    "no config": (GOOD | dict(config={}), "KeyError: 'page_tokens'"),
    "a config of nothing": (GOOD | dict(config=None), "config must be an object, got null"),
    "pages of nothing": (GOOD | dict(config=GOOD["config"] | dict(page_tokens=0)), "ZeroDivision"),
    "pages of text": (GOOD | dict(config=GOOD["config"] | dict(page_tokens="a")), "TypeError"),
    "a nameless one": (GOOD | dict(name=None), "name must be text, got null"),
    "no engine": (GOOD | dict(engine=7), "engine must be text, got 7"),
    "another engine": (GOOD | dict(engine="lru 1"), "there is no engine 'lru'; there are sglang"),
    "events by name": (GOOD | dict(events={}), "events must be a list, got {}"),
    "text for an event": (
        GOOD | dict(events=["match"], observed=[{}]),
        'event 0 must be an object, got "match"',
    ),
    "an event without op": (
        GOOD | dict(events=[dict(tokens=[1])], observed=[{}]),
        "op of event 0 must be text, got null",
    ),
    "text observed": (
        GOOD | dict(events=[dict(op="reset")], observed=["ok"]),
        'what was observed of event 0 must be an object, got "ok"',
    ),
    "not all observed": (GOOD | dict(observed=GOOD["observed"][:-1]), "of them observed"),
    "an abort that is none": (GOOD | dict(tags=["engine_abort"]), "no event has an exception"),
    "tags of nothing": (GOOD | dict(tags=None), "TypeError"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_file_that_is_no_scenario_differs_by_its_path(what, tmp_path):
    content, words = BAD[what]
    file = tmp_path / "bad.json"
    if not isinstance(content, str | bytes):
        content = json.dumps(content)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    verdict = judged(file)
    assert verdict[:1] + verdict[2:7] == (
        *(str(file), "shape", Status.DIFFERS),
        *(None, "error", "absent"),
    )
    assert words in verdict.got and "\n" not in verdict.got
    json.dumps(verdict.as_json())


def test_a_file_that_cannot_be_read_differs_too(tmp_path):
    verdict = judged(tmp_path / "gone.json")
    assert (verdict.status, verdict.engine) == (Status.DIFFERS, "unknown")
    assert "FileNotFoundError" in verdict.got


def test_the_first_word_of_the_engine_says_who_replays_it(tmp_path):
    file = tmp_path / "other.json"
    file.write_text(json.dumps(GOOD | dict(engine="other 1.0 beta")))
    mine = Verdict("mine", "other 1.0 beta", "shape", Status.OK)
    engines = {"sglang": replay, "other": lambda scenario, level: mine}
    assert judged(file, engines.items()) is mine


def test_a_folder_may_have_files_of_both_engines_and_others(tmp_path, capsys, monkeypatch):
    both = ("sglang/eb_cold", "vllm/cold_miss", "vllm/inner_ckpt_resume_inside_block_dense")
    for name in both:
        file = tmp_path / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes((GOLDEN / f"{name}.json").read_bytes())
    (tmp_path / "vllm" / "broken.json").write_text("{")
    done = in_this_process("replay_golden.py", [str(tmp_path)], capsys, monkeypatch)
    assert (done.returncode, done.stderr) == (1, "")
    broken, defect, summary = done.stdout.splitlines()
    assert "broken.json (unknown): differs at construct" in broken
    assert "(vllm 0.33.0): by_design from event 4 on: the engine registers" in defect
    assert summary == "4 scenarios at level shape: 2 ok, 1 differs, 1 by_design"


def test_all_golden_files_have_the_form_of_a_scenario():
    files = [file for folder in ("sglang", "vllm") for file in (GOLDEN / folder).glob("*.json")]
    assert len(files) == 98 + 101
    for file in files:
        check_scenario(json.loads(file.read_text("utf-8")))
