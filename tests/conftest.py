"""Shared by all tests: one torch thread, so that two cores can run two test processes."""

import torch

torch.set_num_threads(1)
