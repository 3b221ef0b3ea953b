"""Expert choices of one run, recorded and forced upon another (decision 9).

Two runs whose router scores differ in the last bits may choose other experts, and then differ
everywhere, although both are right. With the same choices they are one smooth function again.

    choices = ExpertChoices(net)
    with choices.recorded(net):
        net(ids)                                  # all tokens, in order
    with choices.forced(other):
        choices.tokens = torch.tensor([2, 3])     # which of them come next
        other(ids[:, 2:4])
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kimi_mini.model import KimiForCausalLM


class ExpertChoices:
    """The experts that each token of a run chose in each layer; `tokens` says which tokens the
    next call is about to see, in its own order."""

    def __init__(self, net: KimiForCausalLM) -> None:
        self.experts: list[Tensor] = [torch.empty(0)] * len(mixtures(net))
        self.tokens = torch.empty(0, dtype=torch.long)

    @contextlib.contextmanager
    def recorded(self, net: KimiForCausalLM) -> Iterator[None]:
        """Keep the choices of one call over all tokens in order."""

        def keep(i: int) -> Callable:
            def hook(module: nn.Module, args: tuple) -> None:
                self.experts[i] = module.gate(*args).experts

            return hook

        with _hooks(m.register_forward_pre_hook(keep(i)) for i, m in enumerate(mixtures(net))):
            yield

    @contextlib.contextmanager
    def forced(self, net: KimiForCausalLM) -> Iterator[None]:
        """Every call takes the kept choices of `tokens`."""

        def give(i: int) -> Callable:
            def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
                return args, kwargs | {"experts": self.experts[i][self.tokens]}

            return hook

        with _hooks(
            m.register_forward_pre_hook(give(i), with_kwargs=True)
            for i, m in enumerate(mixtures(net))
        ):
            yield


def mixtures(net: KimiForCausalLM) -> list[nn.Module]:
    """The mixtures of experts of the model, in order of its layers."""
    return [layer.block_sparse_moe for layer in net.model.layers if layer.moe]


@contextlib.contextmanager
def _hooks(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    registered = list(handles)
    try:
        yield
    finally:
        for handle in registered:
            handle.remove()
