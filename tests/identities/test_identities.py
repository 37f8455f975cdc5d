"""Every sentence "A then B is X" of the documentation, held against X's own code."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.identities.identity import RECORDINGS, apart, load
from torchzero_clip import Chain
from torchzero_clip.published import NAMES

IDENTITIES = load()
CASES = [
    pytest.param(identity, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name, identity in IDENTITIES.items()
    for dtype in identity.rtol
]
each = pytest.mark.parametrize(("identity", "dtype"), CASES)
recorded = pytest.mark.parametrize(
    ("identity", "dtype"), [case for case in CASES if not case.values[0].live]
)


@each
def test_the_chain_is_the_method(identity: Any, dtype: torch.dtype) -> None:
    options = [{}] if identity.compare != "parameters" else [{}, {"fused": False}]
    for how in options:
        assert identity.distance(dtype, **how) <= 1, f"{identity.claim}, with {how}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, identity in IDENTITIES.items() if identity.compare == "parameters"]
)
def test_the_compiled_chain_is_the_method(name: str) -> None:
    assert IDENTITIES[name].distance(torch.float32, compile=True) <= 1


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # theirs
@recorded
def test_the_official_code_gives_what_was_recorded(identity: Any, dtype: torch.dtype) -> None:
    assert apart(identity.official(dtype), identity.expected(dtype)) <= identity.rtol[dtype]


def test_every_name_is_held_by_an_identity() -> None:
    missing = NAMES.keys() - IDENTITIES.keys()
    assert not missing, f"tests/identities/methods has no identity of {sorted(missing)}"


def test_every_recording_belongs_to_an_identity() -> None:
    kept = {identity.file for identity in IDENTITIES.values() if not identity.live}
    assert set(RECORDINGS.glob("*")) == kept


@pytest.mark.parametrize("name", [name for name, it in IDENTITIES.items() if not it.live])
def test_a_recording_says_what_made_it(name: str) -> None:
    made_with = IDENTITIES[name].recording()["made_with"]
    assert made_with["source"] == IDENTITIES[name].source, "record it again"
    assert set(made_with) == {"source", "python", "torch"}


def test_a_wrong_claim_is_found() -> None:
    """A hundred thousandth more, or a link less, and the chain is no longer the method."""
    lamb = IDENTITIES["lamb"]
    more = dataclasses.replace(lamb, ours=lambda lr, **options: lamb.ours(lr=lr * 1.0001))
    less = dataclasses.replace(lamb, ours=lambda **options: Chain(*lamb.ours(**options)[::3]))
    assert more.distance(torch.float32) > 1
    assert less.distance(torch.float32) > 1


def test_a_recording_of_other_inputs_is_refused() -> None:
    lamb = IDENTITIES["lamb"]
    other = dataclasses.replace(lamb, inputs=dataclasses.replace(lamb.inputs, spike=2.0))
    with pytest.raises(AssertionError, match="the inputs changed, record it again"):
        other.expected(torch.float32)


def test_a_missing_recording_says_how_to_make_it() -> None:
    other = dataclasses.replace(IDENTITIES["lamb"], name="nobody")
    with pytest.raises(FileNotFoundError, match="write it with python"):
        other.expected(torch.float32)
