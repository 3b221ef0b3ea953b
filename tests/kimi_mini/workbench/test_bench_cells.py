"""Which cells a grid has, and which are left out."""

from kimi_mini import preset
from kimi_mini.workbench.bench_cells import SHALLOW, Cell, Plan, Work


def test_what_does_not_fit_is_skipped_with_its_reason():
    config = preset("nano")  # context 1024
    cells, skipped = Plan([0, 1000, 1000, 1024], [1, 8], 30, 16, 2).cells(config)
    assert cells.pop() == Cell(Work.DECODE, 1000, 8, 1, SHALLOW)
    done = {(c.work, c.depth, c.batch): c.length for c in cells}
    assert done == {
        ("prefill", 0, 1): 30,
        ("prefill", 0, 8): 3,
        ("prefill", 1000, 8): 3,
        ("decode", 0, 1): 1,
        ("decode", 0, 8): 1,
        ("decode", 1000, 1): 1,
        ("decode", 1000, 8): 1,
    }
    reasons = {(s.work, s.depth, s.batch): s.reason for s in skipped}
    assert len(reasons) == 5
    assert reasons["prefill", 1000, 1].startswith("1000 + 30 tokens a row are beyond")
    assert reasons["decode", 1024, 1].startswith("1024 + 1 tokens a row are beyond")
    assert "max_position_embeddings" in reasons["decode", 1024, 8]
    (short,) = Plan([0], [4], 3, 16, 2).cells(config)[1]
    assert (short.work, short.reason) == ("prefill", "3 tokens of prompt are not one for each row")
