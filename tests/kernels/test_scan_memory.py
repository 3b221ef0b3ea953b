"""Memory of the chunk form: inputs and outputs grow with the tokens, the rest does not."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from kernels.chunked import kda_chunk_scan
from kimi_mini.workbench.cases import scan_case


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators have made and nobody has dropped yet."""

    def __init__(self):
        super().__init__()
        self.live = {}  # storage reference → bytes
        self.peak = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.live = {ref: size for ref, size in self.live.items() if not ref.expired()}
        inputs = {StorageWeakRef(x.untyped_storage()) for x in _tensors((args, kwargs))}
        for x in _tensors(result):
            reference = StorageWeakRef(x.untyped_storage())
            if reference not in inputs:
                self.live[reference] = x.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self.live.values()))
        return result


def _tensors(tree):
    return [x for x in tree_iter(tree) if isinstance(x, torch.Tensor)]


def peak_bytes(lengths, C):
    case = scan_case("mixed", lengths, H=2, K=64, V=64)
    with torch.no_grad(), LiveBytes() as counter:
        result = kda_chunk_scan(*case, kernel_chunk=C)
    assert counter.peak >= result.o.untyped_storage().nbytes()
    return counter.peak


def test_the_counter_sees_what_lives_at_once_and_not_what_has_died():
    with LiveBytes() as counter:
        for _ in range(10):
            x = torch.zeros(1000) + 1
        del x
    assert 2 * 4000 <= counter.peak <= 4 * 4000


def test_memory_grows_with_the_outputs_and_with_nothing_else():
    """A decay tensor [chunks, C, C, K] would be C times the inputs; all chunks prepared at once, a
    dozen times. Beyond the outputs (kept once in chunks, once in tokens) only a group of chunks
    lives."""
    for C in (16, 64):
        one, four = peak_bytes([2048], C), peak_bytes([4 * 2048], C)
        outputs = 2048 * 2 * 64 * 4
        assert four - one <= 3 * 2.2 * outputs, C


def test_packed_rows_take_no_more_memory_than_one_row_of_their_tokens():
    one, many = peak_bytes([19 * 112], 16), peak_bytes([112] * 19, 16)
    assert many <= 1.3 * one
