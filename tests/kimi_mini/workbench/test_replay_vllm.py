"""vLLM's golden scenarios: what the engine did is what ours does, to the last block."""

import copy
import json
from pathlib import Path

import pytest

from kimi_mini.workbench.replay import Level, Status
from kimi_mini.workbench.replay_vllm import replay

FOLDER = Path(__file__).resolve().parents[2] / "golden" / "vllm"
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}
DEFECTS = {"inner_ckpt_resume_inside_block_dense", "inner_ckpt_resume_inside_block_junction"}  # V26


def scenario(name):
    return json.loads(FILES[name].read_text("utf-8"))


def test_all_of_them_are_here():
    assert len(FILES) == 101 and set(FILES) >= DEFECTS


@pytest.mark.parametrize("level", Level, ids=lambda level: level.name.lower())
@pytest.mark.parametrize("name", FILES)
def test_every_scenario_is_the_same_or_by_design_where_the_engine_is_wrong(name, level):
    verdict = replay(scenario(name), level)
    assert verdict[:3] == (name, "vllm 0.33.0", level.name.lower())
    assert verdict.status is (Status.BY_DESIGN if name in DEFECTS else Status.OK), verdict


@pytest.mark.parametrize(
    "name, event, key", [("cold_miss", 1, "free_order"), ("multi_turn_retention0", 3, "entries")]
)
def test_a_replay_can_tell(name, event, key):
    told = copy.deepcopy(scenario(name))
    seen = told["observed"][event]
    seen[key] = seen[key][::-1] if isinstance(seen[key], list) else seen[key] + 1
    verdict = replay(told, Level.EXACT)
    assert (verdict.status, verdict.event) == (Status.DIFFERS, event)
