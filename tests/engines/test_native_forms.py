"""Native forms: one native call notices every change of address, dtype, shape or strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.helpers import at_once
from torchzero_clip.engines.compiled.replay.native_forms import forms_of


def some() -> list[Tensor]:
    return [torch.zeros(3, 4), torch.zeros(()), torch.zeros(0, 2), torch.zeros(4, 6)[:, ::2]]


def test_addresses_equal_data_ptr() -> None:
    tensors = [*some(), torch.zeros(8)[3:], torch.zeros(2, dtype=torch.bool)]
    seen = forms_of(tensors)
    assert seen is not None
    assert seen.unchanged()
    assert seen.addresses is not None
    assert list(seen.addresses) == [t.data_ptr() for t in tensors]


def given(t: Tensor, new: Tensor) -> None:
    """Give the same tensor object other data, as hooks and `module.to` do."""
    t.data = new


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "address": lambda t: given(t, torch.zeros(3, 4)),
    "offset": lambda t: given(t, t.data.new_zeros(24)[12:].view(3, 4)),
    "shape": lambda t: t.resize_(4, 3),
    "dims": lambda t: t.resize_(12),
    "fewer": lambda t: t.resize_(3, 3),
    "more": lambda t: t.resize_(3, 2, 2),
    "strides": lambda t: t.as_strided_((3, 4), (1, 3)),
    "gaps": lambda t: t.as_strided_((3, 4), (4, 0)),
    "dtype": lambda t: given(t, t.data.view(torch.int32)),
    "half": lambda t: given(t, t.data.half()),
}


@at_once("change", list(CHANGES))
def test_a_tensor_with_another_address_or_form_is_noticed(change: str) -> None:
    """The tensor is one of several, and the change is undone at the end."""
    first, changed, last = torch.zeros(2), torch.zeros(3, 4), torch.zeros(5)
    seen, kept = forms_of([first, changed, last]), changed.detach()
    assert seen is not None
    CHANGES[change](changed)
    assert not seen.unchanged()
    changed.data = kept
    assert seen.unchanged()


def test_other_tensors_with_the_same_forms_give_their_addresses() -> None:
    seen, others = forms_of(some()), some()
    assert seen is not None
    starts = seen.addresses_of(others)
    assert starts is not None
    assert list(starts) == [t.data_ptr() for t in others]
    wide = forms_of([torch.zeros(4, 1)])
    assert wide is not None
    assert wide.addresses_of([torch.zeros(1, 4).t()]), "strides of dims of size 1 do not count"


OTHERS: dict[str, Tensor] = {
    "strides": torch.zeros(4, 3).t(),
    "shape": torch.zeros(4, 3),
    "dims": torch.zeros(3, 4, 1, 1, 1, 1, 1),
    "dtype": torch.zeros(3, 4, dtype=torch.float64),
    "half": torch.zeros(3, 4, dtype=torch.bfloat16),
    "device": torch.zeros(3, 4, device="meta"),
    "sparse": torch.zeros(3, 4).to_sparse(),
    "expanded": torch.zeros(()).expand(3, 4),
}


@at_once("name", list(OTHERS))
def test_other_tensors_with_another_form_give_none(name: str) -> None:
    seen = forms_of([torch.zeros(3, 4), torch.zeros(2)])
    assert seen is not None
    assert seen.addresses_of([OTHERS[name], torch.zeros(2)]) is None
    assert seen.addresses_of([torch.zeros(3, 4), OTHERS[name]]) is None


def test_tensors_that_dlpack_cannot_describe_have_no_native_forms() -> None:
    assert forms_of([torch.zeros(3, device="meta")]) is None
    assert forms_of([torch.zeros(3).to_sparse()]) is None
