"""What one step means for the KDA layers: rows, slots and exports, checked once for all layers.

Slots: real ones are 1 .. num_slots and distinct within a batch; 0 is the padding sink (a row there
runs, and whatever it leaves is meaningless); -1 means no slot: the row is skipped, its outputs are
zeros. A row of no tokens touches nothing. context_len is the boundary of the row's STATE, never of
its attention hit: 0 means that the row starts from zeros whatever its slot contains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.packing import Export, check_exports, check_integers, integers, row_lengths


class RowGroup(NamedTuple):
    """Rows that run through one kernel call, packed anew."""

    tokens: slice | Tensor  # their tokens in the batch
    query_start: list[int]  # [rows+1] within the group
    slots: Tensor  # [rows] int64
    resumed: list[bool]  # [rows] context_len > 0
    exports: list[Export]  # rows numbered within the group; only those with a destination
    export_rows: Tensor  # [exports] int64, the rows of `exports`
    export_slots: Tensor  # [exports] int64


@dataclass(frozen=True)
class KDAMetadata:
    """The rows of one step: `extend` and `decode` share them out, None where a group is empty."""

    num_tokens: int
    extend: RowGroup | None
    decode: RowGroup | None


def build_metadata(
    query_start: Tensor | Sequence[int],
    slots: Tensor | Sequence[int],
    context_len: Tensor | Sequence[int],
    exports: Tensor | Sequence[Sequence[int]] | None,
    *,
    num_slots: int,
    export_alignment: int,
    num_tokens: int | None = None,
    extend_only: bool = False,
) -> KDAMetadata:
    """Check a step and share its rows out.

    query_start [B+1], slots [B], context_len [B]: integers; exports [E, 3] of (row, offset,
    destination slot), or None; destination -1 or 0: computed for nobody. num_tokens: physical
    tokens when the batch is padded beyond query_start[-1] (their outputs are zeros).
    extend_only: send rows of one token through the prefill kernel too, not the decode kernel.
    Raises ValueError naming what is wrong: a slot out of range or used twice, a negative context,
    an export out of place or of a padding row.
    """
    starts = integers("query_start", query_start)
    slots, context_len = integers("slots", slots), integers("context_len", context_len)
    begins, lengths = row_lengths(starts, starts[-1] if starts else 0)
    B = len(lengths)
    physical = starts[-1] if num_tokens is None else num_tokens
    if physical < starts[-1]:
        raise ValueError(f"query_start ends at {starts[-1]}, beyond the {physical} tokens given")
    if len(slots) != B or len(context_len) != B:
        raise ValueError(
            f"query_start describes {B} rows, but there are {len(slots)} slots and "
            f"{len(context_len)} context lengths"
        )
    if any(length < 0 for length in context_len):
        raise ValueError(f"context_len must not be negative, got {min(context_len)}")
    if isinstance(exports, Tensor):
        check_integers("exports", exports, axes=2)
    wanted = [] if exports is None else [_export(entry) for entry in exports]
    check_exports([Export(row, offset) for row, offset, _ in wanted], lengths, export_alignment)
    for row, _, destination in wanted:
        if slots[row] <= 0 < destination:
            raise ValueError(f"an export keeps row {row}, which is padding (slot {slots[row]})")
    _check_slots(slots, [entry[2] for entry in wanted], num_slots)

    extend, decode = [], []
    for r in range(B):
        if lengths[r] and slots[r] != -1:
            (decode if lengths[r] == 1 and not extend_only else extend).append(r)
    return KDAMetadata(
        physical,
        *(_group(rows, begins, lengths, slots, context_len, wanted) for rows in (extend, decode)),
    )


def _group(
    rows: list[int],
    begins: list[int],
    lengths: list[int],
    slots: list[int],
    context_len: list[int],
    wanted: list[tuple[int, ...]],
) -> RowGroup | None:
    if not rows:
        return None
    query_start = [0]
    tokens: list[int] = []
    for r in rows:
        query_start.append(query_start[-1] + lengths[r])
        tokens += range(begins[r], begins[r] + lengths[r])
    consecutive = tokens[-1] - tokens[0] + 1 == len(tokens)
    local = {r: i for i, r in enumerate(rows)}
    mine = [e for e in wanted if e[0] in local and e[2] > 0]
    return RowGroup(
        tokens=slice(tokens[0], tokens[-1] + 1) if consecutive else torch.tensor(tokens),
        query_start=query_start,
        slots=torch.tensor([slots[r] for r in rows]),
        resumed=[context_len[r] > 0 for r in rows],
        exports=[Export(local[row], offset) for row, offset, _ in mine],
        export_rows=torch.tensor([local[row] for row, _, _ in mine], dtype=torch.long),
        export_slots=torch.tensor([slot for _, _, slot in mine], dtype=torch.long),
    )


def _check_slots(slots: list[int], destinations: list[int], num_slots: int) -> None:
    seen: set[int] = set()
    for kind, numbers in (("row", slots), ("export", destinations)):
        for i, slot in enumerate(numbers):
            if not -1 <= slot <= num_slots:
                raise ValueError(
                    f"{kind} {i} names slot {slot}; slots are 1..{num_slots}, 0 (sink) or -1 (none)"
                )
            if slot > 0 and slot in seen:
                raise ValueError(f"{kind} {i} names slot {slot}, which this batch uses already")
            seen.add(slot)


def _export(entry: Tensor | Sequence[int]) -> tuple[int, ...]:
    numbers = () if isinstance(entry, int) else tuple(integers("an export", entry))
    if len(numbers) != 3:
        raise ValueError(f"exports are [E, 3]: (row, offset, destination slot); got entry {entry}")
    return numbers
