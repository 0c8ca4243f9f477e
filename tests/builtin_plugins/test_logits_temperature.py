"""temperature."""

from __future__ import annotations

import pytest
import torch
from support.builtins.fake_rows import build, prepared, request_of, rows_of

from hardpoint.builtin_plugins.logits.temperature import Temperature
from hardpoint.plugins import Phase, SamplingParams


def test_divides_each_row_by_its_own_temperature():
    processor = build(Temperature, "temperature")
    rows = rows_of(
        processor,
        request_of(processor, temperature=0.5),
        request_of(processor, temperature=2.0),
    )
    logits = torch.tensor([[1.0, -torch.inf], [1.0, -4.0]])
    assert processor.apply(logits, rows).tolist() == [[2.0, -torch.inf], [0.5, -2.0]]


@pytest.mark.parametrize("temperature", [1e-5, 1e30, 1e38, 1e300])
def test_extreme_temperatures_never_make_nan(temperature):
    processor = build(Temperature, "temperature")
    rows = rows_of(processor, request_of(processor, temperature=temperature))
    result = processor.apply(torch.tensor([[20.0, -20.0, -torch.inf]]), rows)
    assert result[0, :2].isfinite().all()
    assert result[0, 2] == -torch.inf


def test_a_huge_temperature_is_uniform():
    processor = build(Temperature, "temperature")
    rows = rows_of(processor, request_of(processor, temperature=1e300))
    probs = processor.apply(torch.tensor([[20.0, -20.0]]), rows).softmax(-1)
    assert probs.tolist() == [[0.5, 0.5]]


def test_refuses_to_contradict_the_requests_own_temperature():
    with pytest.raises(ValueError, match=r"expected SamplingParams.temperature \(1.0\), got 0.0"):
        prepared(Temperature, temperature=0.0)
    params = SamplingParams(temperature=0.7)
    assert prepared(Temperature, params=params, temperature=0.7).temperature == 0.7


def test_runs_in_its_phase():
    assert Temperature.phase is Phase.TEMPERATURE
