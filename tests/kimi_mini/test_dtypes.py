"""Types by name."""

import pytest
import torch

from kimi_mini import KimiForCausalLM, preset
from kimi_mini.dtypes import at_least_float32, torch_dtype


def test_a_dtype_is_known_by_its_name_and_as_itself():
    assert torch_dtype("bfloat16") is torch.bfloat16 is torch_dtype(torch.bfloat16)
    assert KimiForCausalLM.from_config(preset("nano"), dtype="float64").dtype == torch.float64


@pytest.mark.parametrize("name", ["int8", "fp32", "", torch.int64, None])
def test_other_types_are_refused_by_name(name):
    with pytest.raises(ValueError, match="allowed: float32, bfloat16, float16, float64"):
        torch_dtype(name)


def test_half_precision_is_raised_to_float32_and_nothing_else():
    raised = [at_least_float32(torch_dtype(name)) for name in ("float16", "bfloat16", "float64")]
    assert raised == [torch.float32, torch.float32, torch.float64]
