"""Every sentence "A then B is X" of the documentation, held against X's own code."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.identities.identity import RECORDINGS, apart, counts_of, load
from tests.identities.inputs import PLAIN, STEPS
from torchzero_clip import Chain, Scale
from torchzero_clip.published import NAMES

IDENTITIES = load()
CASES = [
    pytest.param(identity, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name, identity in IDENTITIES.items()
    for dtype in identity.rtol
]
UNFUSED = {"fused": False}


KINDS = [(it.source, [type(tfm) for tfm in it.chain().walk()]) for it in IDENTITIES.values()]


def is_variant(identity: Any) -> bool:
    """Whether an earlier identity has the same links and the same source, with other arguments."""
    place = list(IDENTITIES).index(identity.name)
    return KINDS[place] in KINDS[:place]


def is_quick(identity: Any, dtype: torch.dtype, how: dict[str, bool]) -> bool:
    """Whether the quick tests run an identity: in float64 without fusion, and one in three also in
    float32 in the default engine. Other tests require that the engines agree."""
    if len(identity.rtol) == 1:
        return True
    if dtype == torch.float64:
        return bool(how)
    return not how and not is_variant(identity) and list(IDENTITIES).index(identity.name) % 3 == 0


WAYS = [
    pytest.param(
        case.values[0],
        case.values[1],
        how,
        id=f"{case.id}{'-fused=False' if how else ''}",
        marks=() if is_quick(*case.values, how) else pytest.mark.slow,
    )
    for case in CASES
    for how in ({}, UNFUSED)
    if case.values[0].compare == "parameters"
]
OTHERS = [case for case in CASES if case.values[0].compare != "parameters"]
recorded = pytest.mark.parametrize(
    ("identity", "dtype"), [case for case in CASES if not case.values[0].runs_here]
)


@pytest.mark.parametrize(("identity", "dtype", "how"), WAYS)
def test_the_chain_is_the_method(identity: Any, dtype: torch.dtype, how: dict[str, bool]) -> None:
    assert identity.distance(dtype, **how) <= 1, f"{identity.claim}, with {how}"


@pytest.mark.parametrize(("identity", "dtype"), OTHERS)
def test_the_rule_is_the_method(identity: Any, dtype: torch.dtype) -> None:
    assert identity.distance(dtype) <= 1, identity.claim


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, identity in IDENTITIES.items() if identity.compare == "parameters"]
)
def test_the_compiled_chain_is_the_method(name: str) -> None:
    assert IDENTITIES[name].distance(torch.float32, compile=True) <= 1


@pytest.mark.filterwarnings(
    "ignore:.*from the checkpoint replaces:UserWarning"
)  # live values are scheduled
@pytest.mark.parametrize(
    ("identity", "dtype"),
    [
        pytest.param(
            *case.values,
            id=case.id,
            marks=() if case.values[1] == torch.float32 else pytest.mark.slow,
        )
        for case in CASES
        if case.values[0].evaluates
    ],
)
def test_weights_for_evaluation_are_the_same_in_a_run_that_was_resumed(
    identity: Any, dtype: torch.dtype
) -> None:
    """In the middle of training, and from a checkpoint of an evaluation."""
    assert identity.distance(dtype, resumes=True) <= 1


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # theirs
@recorded
def test_the_official_code_gives_what_was_recorded(identity: Any, dtype: torch.dtype) -> None:
    assert apart(identity.official(dtype), identity.expected(dtype)) <= identity.rtol[dtype]


@pytest.mark.parametrize("name", IDENTITIES)
def test_every_live_value_changes_with_the_steps(name: str) -> None:
    """Of each there is a schedule, or a reason why it stays."""
    identity = IDENTITIES[name]
    assert set(identity.live) - identity.scheduled.keys() <= identity.constant.keys()
    for letter in "ab":
        options = identity.options(letter)
        for key in identity.scheduled:
            seen = [identity.ours_in(letter, i)[key] for i in range(PLAIN, STEPS)]
            first = seen[0] if isinstance(seen[0], tuple) else (seen[0],)
            moves = any(first) and first != (None,)  # zero and None stay what they are
            assert (len(set(seen)) > 1) is moves, f"{key} with {options}"


@pytest.mark.parametrize("name", IDENTITIES)
def test_every_count_is_passed_with_a_spike_at_its_end(name: str) -> None:
    identity = IDENTITIES[name]
    left = [count for count, steps in counts_of(identity) if steps > STEPS - 2]
    assert set(left) <= identity.constant.keys()
    inputs = identity.inputs
    for boundary in inputs.boundaries:
        spikes = [
            grads[row]
            for i, (row, _) in enumerate(reversed(inputs.shapes))
            for grads in [inputs.gradients(boundary - 1, torch.float64)]
            if inputs.spikes(i, boundary - 1)
        ]
        assert any(grad is not None for grad in spikes), boundary


@pytest.mark.parametrize("name", IDENTITIES)
def test_every_row_is_without_a_gradient_now_and_then(name: str) -> None:
    """The official codes for which gaps are turned off say so where they are built."""
    inputs = IDENTITIES[name].inputs
    missing = {row: 0 for row, _ in inputs.shapes}
    for i in range(STEPS):
        for row, grad in inputs.gradients(i, torch.float32).items():
            missing[row] += grad is None
    assert all((count >= 3) is inputs.gaps for count in missing.values())
    without = {n for n, it in IDENTITIES.items() if not it.inputs.gaps}
    assert without == WITHOUT_GAPS


WITHOUT_GAPS = {
    "adafactor_unfactored", "adagc", "ema_adamw", "ema_diffusers", "ema_pytorch", "klsoap",
    "kron_all", "kron_longer", "kron_one", "kron_short",
    "lamb_timm", "lambc", "lookahead_adam", "lookahead_timm", "nanochat", "normuon",
    "schedule_free_adamw", "schedule_free_radam", "shampoo", "soap", "soap_from_first_step",
    "soap_hyperball_seldom", "spam", "spike_clip", "stable_adamw",
}  # fmt: skip
"""Whose official code counts other steps, asks for all gradients, or goes on without one."""


def test_every_name_is_held_by_an_identity() -> None:
    missing = NAMES.keys() - IDENTITIES.keys()
    assert not missing, f"tests/identities/methods has no identity of {sorted(missing)}"


def test_every_recording_belongs_to_an_identity() -> None:
    kept = {identity.file for identity in IDENTITIES.values() if not identity.runs_here}
    assert set(RECORDINGS.glob("*")) == kept


@pytest.mark.parametrize("name", [name for name, it in IDENTITIES.items() if not it.runs_here])
def test_a_recording_says_what_made_it(name: str) -> None:
    made_with = IDENTITIES[name].recording()["made_with"]
    assert made_with["source"] == IDENTITIES[name].source, "record it again"
    assert set(made_with) == {"source", "python", "torch"}


def test_a_wrong_claim_is_found() -> None:
    """A ten thousandth more, or a link less, and the chain is no longer the method."""
    lamb = IDENTITIES["lamb"]
    more = dataclasses.replace(lamb, ours=lambda **o: Chain(lamb.ours(**o), Scale(1.0001)))
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
