import pytest
import torch


@pytest.fixture
def threads():
    """Set the number of torch threads; one again afterwards."""
    yield torch.set_num_threads
    torch.set_num_threads(1)
