"""Every kernel test draws the same numbers whatever ran before it."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
