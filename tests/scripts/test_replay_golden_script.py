"""scripts/replay_golden.py: what it prints, what it exits with, and what a user gets wrong."""

import json
from pathlib import Path

import pytest

from kimi_mini.workbench import replay_sglang
from tests.scripts.running import as_a_command, in_this_process

SCRIPT = "replay_golden.py"
FOLDER = Path(__file__).resolve().parent.parent / "golden" / "sglang"
KEYS = ["name", "engine", "level", "status", "event", "field", "want", "got"]


@pytest.fixture
def scenario():
    return json.loads((FOLDER / "tree_two_branches.json").read_text("utf-8"))


def test_as_a_command_from_anywhere_all_scenarios_are_the_same_or_by_design(tmp_path):
    done = as_a_command(SCRIPT, str(FOLDER), "--level", "exact", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    *lines, summary = done.stdout.splitlines()
    assert summary == "98 scenarios at level exact: 88 ok, 0 differs, 10 by_design"
    assert len(lines) == 10 and all(": by_design: the engine" in line for line in lines)


def test_json_is_one_verdict_a_scenario_with_these_keys(capsys, monkeypatch):
    names = ["eb_cold", "eb_state_exhausted"]
    paths = [str(FOLDER / f"{name}.json") for name in names]
    done = in_this_process(SCRIPT, [*paths, "--json"], capsys, monkeypatch)
    cold, aborted = json.loads(done.stdout)
    assert (done.returncode, [*cold], [*aborted]) == (0, KEYS, KEYS)
    assert [*cold.values()] == ["eb_cold", "sglang 0.5.23", "shape", "ok", None, None, None, None]
    assert aborted["status"] == "by_design"
    assert (aborted["event"], aborted["field"]) == (3, replay_sglang.ABORTS)


@pytest.mark.parametrize("level, code", [("token", 0), ("shape", 1), ("exact", 1)])
def test_a_difference_is_exit_code_1_and_says_where(
    level, code, scenario, tmp_path, capsys, monkeypatch
):
    scenario["observed"][1]["free_kv"] = 5
    file = tmp_path / "lie.json"
    file.write_text(json.dumps(scenario))
    args = [str(file), "--level", level]
    done = in_this_process(SCRIPT, args, capsys, monkeypatch)
    assert done.returncode == code
    if code:
        assert done.stdout.splitlines() == [
            "tree_two_branches (sglang 0.5.23): differs at event 1, free_kv: want 5, got 50",
            f"1 scenarios at level {level}: 0 ok, 1 differs, 0 by_design",
        ]
    (verdict,) = json.loads(in_this_process(SCRIPT, [*args, "--json"], capsys, monkeypatch).stdout)
    assert verdict["status"] == ("differs" if code else "ok")
    if code:
        assert [*verdict.values()][4:] == [1, "free_kv", 5, 50]


def test_a_difference_of_sizes_is_at_the_construction(scenario, tmp_path, capsys, monkeypatch):
    scenario["construct"]["free_kv"] = 1
    (tmp_path / "lie.json").write_text(json.dumps(scenario))
    done = in_this_process(SCRIPT, [str(tmp_path)], capsys, monkeypatch)
    assert (done.returncode, "differs at construct, free_kv" in done.stdout) == (1, True)


def test_folders_are_searched_to_the_bottom(scenario, tmp_path, capsys, monkeypatch):
    for name in ("a/b/one.json", "a/two.json", "a/README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(scenario))
    done = in_this_process(SCRIPT, [str(tmp_path), "--json"], capsys, monkeypatch)
    assert len(json.loads(done.stdout)) == 2


def mistakes(tmp_path, scenario):
    def file(name, text):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    (tmp_path / "empty").mkdir()
    yield [str(tmp_path / "none.json")], "none.json"
    yield [str(tmp_path / "empty")], "there is no scenario (*.json) in"
    yield [file("a.json", "{")], "a.json is not JSON"
    yield [file("b.json", "[]")], "b.json is no scenario: it lacks config, construct"
    yield [file("c.json", json.dumps(scenario | dict(engine="lru 1")))], "of engine 'lru'"
    yield [file("d.json", json.dumps(scenario | dict(engine=None)))], "of engine 'None'"
    yield [file("e.json", json.dumps(scenario | dict(observed=[])))], "zip() argument"
    yield [str(FOLDER), "--level", "vague"], "token, shape, exact"
    yield [], "paths"


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, scenario, capsys, monkeypatch):
    for args, words in mistakes(tmp_path, scenario):
        done = in_this_process(SCRIPT, args, capsys, monkeypatch)
        assert (done.returncode, done.stdout) == (2, ""), args
        last = done.stderr.splitlines()[-1].replace(
            "'token', 'shape', 'exact'", "token, shape, exact"
        )
        assert words in last, (args, done.stderr)
        assert "Traceback" not in done.stderr
