"""Memory in huge pages: the same tensors, elsewhere."""

import io
import itertools
import mmap

import pytest
import torch
from torch import nn

from kimi_mini import KimiForCausalLM, huge_pages, preset
from kimi_mini.batch import allocate_state

needs_pages = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no transparent huge pages"
)
COUNT = huge_pages.WORTH_IT // 4


def net():
    """Parameters of several types and sizes, two of them one."""
    parts = nn.ModuleList(nn.Linear(n, 700, dtype=t) for n, t in ((999, torch.float32),
        (333, torch.bfloat16), (1000, torch.float64)))  # fmt: skip
    parts.append(nn.Linear(999, 700))
    parts[3].weight = parts[0].weight
    parts[1].weight.requires_grad_(False)
    return parts


@needs_pages
def test_what_is_large_begins_with_a_page_and_is_zero():
    x = huge_pages.zeros((3, COUNT), torch.float32)
    assert x.shape == (3, COUNT) and x.is_contiguous() and not x.any()
    assert x.data_ptr() % huge_pages.HUGE == 0
    x.normal_()
    assert x.untyped_storage().nbytes() == x.nbytes
    assert huge_pages.zeros((2, COUNT // 4), torch.float64).dtype == torch.float64


def test_what_is_small_is_torch_s_own():
    x = huge_pages.zeros((COUNT - 1,), torch.float32)
    assert not x.any()
    assert huge_pages.take(4 * (COUNT - 1)) is None
    assert huge_pages.zeros((0, 3), torch.bfloat16).shape == (0, 3)


@needs_pages
@pytest.mark.parametrize("denied", ["mmap", "madvise"])
def test_a_system_that_declines_gives_torch_s_own(monkeypatch, denied):
    class Refusing(mmap.mmap):
        def __new__(cls, *args, **kwargs):
            if denied == "mmap":
                raise OSError("no memory")
            return super().__new__(cls, *args, **kwargs)

        def madvise(self, *_):
            raise OSError("no huge pages")

    monkeypatch.setattr(huge_pages.mmap, "mmap", Refusing)
    x = huge_pages.zeros((COUNT,), torch.float32)
    assert huge_pages.take(4 * COUNT) is None and not x.any()


@needs_pages
def test_parameters_move_and_stay_what_they_are():
    one, other = net(), net()
    other.load_state_dict(one.state_dict())
    before = dict(one.named_parameters())
    huge_pages.gather(one.parameters())
    after = dict(one.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert one[3].weight is one[0].weight
    assert [p.requires_grad for p in one.parameters()] == [
        p.requires_grad for p in other.parameters()
    ]
    for (name, moved), kept in zip(after.items(), other.parameters(), strict=True):
        assert torch.equal(moved, kept), name
        assert moved.untyped_storage().nbytes() == moved.nbytes, name
    places = [(p.data_ptr(), p.nbytes) for p in one.parameters()]
    assert places[0][0] % huge_pages.HUGE == 0
    for (place, size), (following, _) in itertools.pairwise(places):
        assert 0 <= following - (place + size) < 64

    optimiser = torch.optim.SGD(one.parameters(), lr=1.0)
    one[0](torch.ones(2, 999)).sum().backward()
    optimiser.step()
    assert torch.allclose(one[0].weight, other[0].weight - 2)


@needs_pages
def test_one_of_them_is_saved_alone():
    one = net()
    huge_pages.gather(one.parameters())
    file = io.BytesIO()
    torch.save(one[1].bias, file)
    assert len(file.getvalue()) < 10_000


@needs_pages
def test_a_model_and_its_state_lie_there():
    config = preset("mini")
    model = KimiForCausalLM(config)
    first, *_, last = model.parameters()
    size = sum(p.nbytes for p in model.parameters())
    assert first.data_ptr() % huge_pages.HUGE == 0
    assert size <= last.data_ptr() + last.nbytes - first.data_ptr() < size + 64 * 500
    state = allocate_state(config, num_slots=9, num_pages=900)
    assert all(part.data_ptr() % huge_pages.HUGE == 0 for part in state if part.nbytes > 4 << 20)
    with torch.device("meta"):
        assert all(p.is_meta for p in KimiForCausalLM(config).parameters())
