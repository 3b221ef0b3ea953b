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
    assert summary == "98 scenarios at level exact: 93 ok, 0 differs, 5 by_design"
    cuts, remarks = ([line for line in lines if word in line] for word in ("by_design", "remark"))
    assert (len(cuts), len(remarks), len(lines)) == (5, 5, 10)
    assert all(" by_design from event " in line and ": the engine" in line for line in cuts)
    assert remarks[0].startswith(
        "random_007 (sglang 0.5.23): ok, with a remark on event 27: the engine never releases"
    )


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


def test_a_bad_file_is_one_line_and_takes_no_other_verdict_away(
    scenario, tmp_path, capsys, monkeypatch
):
    """Exit code 1, as for any difference: what was asked for has been done."""
    bad = scenario | dict(events=[*scenario["events"]], name="unknown_argument")
    bad["events"][1] = bad["events"][1] | dict(depth=3)
    texts = {
        "a.json": "{",
        "b.json": json.dumps(dict(hidden_size=8)),
        "c.json": json.dumps(scenario | dict(engine="lru 1")),
        "d.json": json.dumps(bad),
        "e.json": json.dumps(scenario),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder.json").mkdir()
    done = in_this_process(SCRIPT, [str(tmp_path)], capsys, monkeypatch)
    assert (done.returncode, done.stderr) == (1, "")
    *lines, summary = done.stdout.splitlines()
    assert summary == "5 scenarios at level shape: 1 ok, 4 differs, 0 by_design"
    for line, words in zip(
        lines,
        (
            "a.json (unknown): differs at construct, error: want absent, got JSONDecodeError: ",
            "b.json (unknown): differs at construct, error: want absent, got ValueError: no scen",
            "c.json (lru 1): differs at construct, error: want absent, got ValueError: there is",
            "unknown_argument (sglang 0.5.23): differs at event 1, error: want absent, got Type",
        ),
        strict=True,
    ):
        assert words in line
    done = in_this_process(SCRIPT, [str(tmp_path), "--json"], capsys, monkeypatch)
    verdicts = json.loads(done.stdout)
    assert (done.returncode, len(verdicts)) == (1, 5)
    assert all([*verdict] == KEYS for verdict in verdicts)
    assert [verdict["event"] for verdict in verdicts] == [None, None, None, 1, None]


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    for args, words in (
        ([str(FOLDER), str(tmp_path / "none.json")], "there is no file or folder"),
        ([str(tmp_path / "empty")], "there is no scenario (*.json) in"),
        ([str(FOLDER), "--level", "vague"], "token, shape, exact"),
        ([], "paths"),
    ):
        done = in_this_process(SCRIPT, args, capsys, monkeypatch)
        assert (done.returncode, done.stdout) == (2, ""), args
        (line,) = done.stderr.splitlines()
        assert words in line.replace("'token', 'shape', 'exact'", "token, shape, exact")
