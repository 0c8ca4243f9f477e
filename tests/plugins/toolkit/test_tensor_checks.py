"""Changes that a plugin may make to a tensor that it is given, and results for it."""

from __future__ import annotations

import pytest
import torch

from hardpoint.toolkit.logits_calls.tensor_checks import HandedOver


def replaced(logits, data):
    logits.data = data
    return logits


def emptied(logits):
    logits.untyped_storage().resize_(0)
    return logits


CHANGES = {
    "shape, strides, memory": lambda logits: logits.resize_(3, 300),
    "shape, strides of": lambda logits: logits.resize_(2, 3),
    "shape, strides": lambda logits: logits.t_(),
    "shape": lambda logits: logits.unsqueeze_(0),
    "strides": lambda logits: logits.as_strided_((2, 5), (0, 1)),
    "dtype, memory": lambda logits: replaced(logits, logits.double()),
    "memory": lambda logits: replaced(logits, logits + 1),
    "memory of": lambda logits: logits.set_(torch.zeros(2, 5)),
    "memory, memory's size": emptied,
}


@pytest.mark.parametrize(("part", "change"), CHANGES.items())
@pytest.mark.parametrize("returned", ["the tensor itself", "another"])
def test_a_changed_layout_is_reported_by_what_changed(part, change, returned):
    logits = torch.zeros(2, 5)
    handed_over = HandedOver(logits)
    result = change(logits) if returned != "another" else (change(logits), torch.zeros(2, 5))[1]
    with pytest.raises(ValueError, match=f"^it changed the {part}.*only their values may be ed"):
        handed_over.result(result)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.zeros(2, 5).to_sparse(), "expected logits of layout torch.strided, got torch.spar"),
        (torch.zeros(2, 5, device="meta"), "expected logits of device cpu, got meta"),
        (torch.zeros(2, 4), r"expected logits of shape torch.Size\(\[2, 5\]\)"),
        (torch.zeros(2, 5).half(), "expected logits of dtype torch.float32, got torch.float16"),
    ],
)
def test_a_result_is_as_what_was_handed_over(result, message):
    with pytest.raises(ValueError, match=message):
        HandedOver(torch.zeros(2, 5)).result(result)


def test_values_may_be_edited_and_a_result_with_shared_rows_is_copied():
    logits = torch.zeros(2, 5)
    handed_over = HandedOver(logits)
    assert handed_over.result(logits.fill_(1.0)) is logits
    one_row_for_all = handed_over.result(logits[:1].expand(2, 5))
    one_row_for_all[0, 0] = 7.0
    assert one_row_for_all.tolist() == [[7.0, 1.0, 1.0, 1.0, 1.0], [1.0] * 5]
    assert logits.tolist() == [[1.0] * 5] * 2
    grown = handed_over.result(torch.nn.Parameter(torch.ones(2, 5)))
    assert not grown.requires_grad
