"""Every rule and every name on an imagined GPU: nothing waits, and what its kind costs is in a
table, for however many tensors.

Nothing here needs a GPU. What stays unknown without one: docs/tested.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch

from tests.audit.budgets import (
    CHAINS,
    COMPILED,
    HEADS,
    REPEATED,
    SMALL,
    TABLE,
    Budget,
    Chain,
    budgets,
    families,
    memory,
    rules,
    steps,
)
from tests.helpers import at_once, run_each, some
from torchzero_clip import (
    LR,
    AdaClip,
    AdaGC,
    Adam,
    AutoClip,
    Cautious,
    Centralize,
    ClipNorm,
    ClipNormByEMA,
    Clippy,
    ClipValue,
    DAdaptAdam,
    Group,
    Guard,
    Hyperball,
    Lion,
    Lookahead,
    MaxNorm,
    Noise,
    OrthoGrad,
    Prodigy,
    ScheduleFree,
    SkipLarge,
    SkipSpike,
    StableAdam,
    Standardize,
    State,
    TensorList,
    Transform,
    WeightDecay,
    WeightEMA,
    ZClip,
    named,
)
from torchzero_clip.audit import Ledger, lines, same
from torchzero_clip.engines.compiled.printers import backends
from torchzero_clip.engines.pieces import pieces

BUDGETS = budgets()
DTYPES = (torch.float32, torch.bfloat16)
READS = {"SkipLarge-huge": 1, "SkipSpike-new": 1}
"""Guards with no fused optimizer at the end: docs/guards.md, "Nothing waits"."""
COUNTS = {"When-odd", "Reset-average", "Accumulate-2", "spam", "stable_spam"}
RENEWED = {"SOAPBasis-every 2", "InBasis-soap", "soap", "KLBasis-every 2", "klsoap"}
RENEWED |= {"Shampoo-every 2", "shampoo", "Kron-default", "kron"}
COUNTS |= RENEWED
"""What is done in a step depends on its number, which the host knows."""
WAITS = {"ClipSpectral-0.5"}
"""Singular values come of torch's eigh, which waits inside."""
FUNCTIONS = {"Lambda-tanh", "Project-relu", "QKClip-heads"}
"""A function of the user is called for each tensor."""
GROWS = FUNCTIONS | {"Reset-average"}
"""What takes more calls the more tensors there are."""
SENT = {
    "QKClip-heads": 2,
    "Project-relu": 1,
    "ClipSpectral-0.5": 2,
    "InBasis-soap": 2,
    "soap": 3,
    "klsoap": 3,
    "soap_hyperball": 5,
    "Shampoo-every 2": 2,
    "Kron-default": 2,
    "shampoo": 5,
    "muoneq": 3,
    "normuon": 3,
    "muon_plus": 3,
    "nanochat": 4,
    "kimi_k3": 1,
    "glm5": 2,
    "adamuon": 3,
    "polar": 2,
    "nordion2": 3,
    "dion3": 3,
}
"""What a compiled step sends: tables of addresses, where a link makes other memory in each step; of
some one more in half precision, where gradients are widened. `kimi_k3` sends one in its first steps
only, but the memory of its later steps changes too, so they are not compared with each other."""


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels on imagined tensors are counted, and need no Triton."""
    monkeypatch.setattr(backends.triton, "here", lambda: True)


def check(chain: Chain, calls: int | None, ledgers: Sequence[Ledger], sent: int = 0) -> None:
    """No wait, no copy, equal steps where none is sent, and no more calls than the table has."""
    *_, before, last = ledgers
    assert len(last.reads) <= READS.get(chain.name.rpartition(" ")[2], 0), lines(last.reads)
    assert len(last.copies) <= sent, (chain.name, *lines(last.copies))
    assert last.waits == [] or chain.name in WAITS, lines(last.waits)
    if chain.name not in COUNTS and not sent:
        assert same(before, last) is None
    if calls is not None:
        assert last.calls <= calls, f"{chain.name}: {last.calls} calls, and may have {calls}"


def test_every_chain_is_in_one_family_of_the_table() -> None:
    members = [member for family in families() for member in family.members]
    assert sorted(members) == sorted([chain.kind for chain in CHAINS])


def test_a_family_may_take_a_tenth_more_than_the_dearest_of_it_took() -> None:
    assert Budget(2, 32, 0, 10).with_air == (2, 35, 0, 11)
    assert "".join(map(str, families())) == TABLE.read_text().removeprefix(HEADS)


BY_KIND = {chain.kind: chain for chain in CHAINS}
OF_EACH = [BY_KIND[family.members[0]] for family in families()]
"""One of each family. The step of every second family is quick, in one of the two dtypes."""
SINGLE = OF_EACH[::4]
HALF = OF_EACH[2::4]


@pytest.mark.parametrize(
    ("chains", "dtype"),
    [
        pytest.param(SINGLE, torch.float32, id="some in float32"),
        pytest.param(
            [chain for chain in CHAINS if chain not in SINGLE],
            torch.float32,
            id="others in float32",
            marks=pytest.mark.slow,
        ),
        pytest.param(HALF, torch.bfloat16, id="some in bfloat16"),
        pytest.param(
            [chain for chain in CHAINS if chain not in HALF],
            torch.bfloat16,
            id="others in bfloat16",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_step_waits_for_nothing_and_keeps_its_budget(
    chains: Sequence[Chain], dtype: torch.dtype
) -> None:
    def keeps(chain: Chain) -> None:
        check(chain, BUDGETS[chain.kind].of(dtype), steps(chain, 12, dtype))

    run_each(keeps, "chain", chains)


SAMPLE = [chain for chain in CHAINS if chain.name in ("ClipNorm-tensor", "AGC-unit")]
OTHERS = [chain for chain in CHAINS if chain not in SAMPLE]
FEW = [*SAMPLE, *[chain for chain in CHAINS if chain.kind == "Lambda"]]
MOST = [chain for chain in CHAINS if chain not in FEW]


@pytest.mark.parametrize(
    "chains",
    [
        pytest.param(SAMPLE, id="some"),
        pytest.param(OTHERS, id="others", marks=pytest.mark.slow),
    ],
)
@at_once("dtype", DTYPES)
def test_a_compiled_step_waits_for_nothing_and_keeps_its_budget(
    chains: Sequence[Chain], dtype: torch.dtype
) -> None:
    for chain in chains:
        found = steps(chain, 12, dtype, engine=COMPILED, turns=REPEATED)
        check(chain, BUDGETS[chain.kind].compiled, found, SENT.get(chain.name, 0))


@pytest.mark.parametrize(
    "chains",
    [
        pytest.param(FEW, id="some"),
        *[
            pytest.param(MOST[i::8], id=f"others, part {i + 1} of 8", marks=pytest.mark.slow)
            for i in range(8)
        ],
    ],
)
@at_once("dtype", DTYPES)
def test_calls_do_not_grow_with_the_number_of_tensors(
    chains: Sequence[Chain], dtype: torch.dtype
) -> None:
    """Nine are three of each shape: of fewer each has a call of its own, since packs cost more.

    What is said to grow does.
    """
    for chain in chains:
        few, many = steps(chain, 9, dtype)[-1].calls, steps(chain, 40, dtype)
        if chain.name in GROWS:
            assert many[-1].calls > few, f"{chain.name}: {few} calls, and no more of 40 tensors"
        else:
            check(chain, few, many)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@at_once("chain", [chain for chain in rules(every=True) if not chain.draws])
def test_a_step_of_every_construction_waits_for_nothing(chain: Chain, dtype: torch.dtype) -> None:
    *_, last = steps(chain, 3, dtype)
    assert last.copies == [], lines(last.copies)
    if not chain.name.startswith(("Skip", "Guard")):
        assert last.reads == [], lines(last.reads)


# --- memory

HEADLINE = [ClipNorm(1.0, dim="global"), Adam(), WeightDecay(0.01), LR(1e-3)]
ENTRIES = {
    "headline": lambda: HEADLINE,
    "behind a guard": lambda: [Guard(), ZClip(), *HEADLINE],
    "entries": lambda: [ClipValue(0.1), Lion(), WeightDecay(0.01), LR(1e-3)],
    "two clips": lambda: [ClipNorm(1.0), ClipNorm(1.0, dim="global"), LR(1e-3)],
    "gradients": lambda: [Guard("zero"), Centralize(), Standardize(), AdaClip(), LR(1e-3)],
    "by their weights": lambda: [OrthoGrad(), LR(1e-3), Clippy()],
    "signs": lambda: [Cautious(), LR(1e-3)],
    "stable": lambda: [StableAdam(), LR(1e-3)],
    "in a ball": lambda: [LR(1e-3), MaxNorm(1.0)],
    "on a sphere": lambda: [LR(1e-3), Hyperball()],
    "averaged": lambda: [*HEADLINE, WeightEMA(0.99)],
    "in the place of the weights": lambda: [*HEADLINE, ScheduleFree()],
    "drawn back": lambda: [*HEADLINE, Lookahead()],
    "an average's norm": lambda: [ClipNormByEMA(0.9), Adam(), LR(1e-3)],
    "free of a rate": lambda: [Prodigy(weight_decay=0.1, decouple=False), LR(1.0)],
    "free of a rate by a bound": lambda: [DAdaptAdam(weight_decay=0.1)],
    "spikes": lambda: [named("spam")],
}


LISTS = {
    "headline": 0,
    "behind a guard": 1,
    "entries": 2,
    "two clips": 1,
    "gradients": 3,
    "by their weights": 3,
    "signs": 2,
    "stable": 2,
    "in a ball": 3,
    "on a sphere": 3,
    "averaged": 2,
    "in the place of the weights": 2,
    "drawn back": 2,
    "an average's norm": 1,
    "free of a rate": 1,
    "free of a rate by a bound": 1,
    "spikes": 2,
}
"""How many lists of the size of the update a step needs at once."""


@pytest.mark.parametrize("name", some(list(ENTRIES), one_in=9))
def test_a_step_takes_few_lists_of_the_update_and_64_mib(name: str) -> None:
    chain, shape = Chain(name, ENTRIES[name]), (2560, 4096)
    for n in (2, 4):
        size = 4 * n * math.prod(shape)
        peak = steps(chain, n, shapes=[shape], turns=2)[-1].peak
        assert peak <= LISTS[name] * size + 2**26


FREE = ["headline", "entries", "averaged", "in the place of the weights", "drawn back", "spikes"]
"""Chains that need no list of the update with `compile=True`."""


@pytest.mark.parametrize("name", some(FREE, one_in=3))
def test_a_compiled_step_takes_no_list_of_the_update(name: str) -> None:
    chain = Chain(name, ENTRIES[name])
    few, many = [
        steps(chain, n, shapes=[(2560, 4096)], engine=COMPILED, turns=2)[-1].peak for n in (2, 4)
    ]
    assert few <= 2**26
    assert many <= 2**26


@pytest.mark.slow
@at_once("chain", CHAINS)
def test_a_step_keeps_its_budget_of_memory(chain: Chain) -> None:
    assert memory(chain) <= BUDGETS[chain.kind].mib + 1


def test_the_headline_is_fourteen_calls() -> None:
    *_, last = steps(Chain("headline", lambda: HEADLINE), 200)
    assert last.calls == 14


# --- a model of 7 billion entries

BLOCK = [*[(4096, 4096)] * 4, *[(11008, 4096)] * 2, (4096, 11008), (4096,), (4096,)]
BILLIONS = [(32000, 4096), *BLOCK * 32, (4096,), (32000, 4096)]
PIECES = list(pieces([torch.empty(shape, device="meta") for shape in BILLIONS], cuts=True))
IN_PIECES = sum([piece.end - piece.begin for piece in PIECES])
SEVEN = len(BILLIONS), BILLIONS
BEHIND = HEADLINE[1:]


class Counted(NamedTuple):
    """The calls of a step: with few entries, and for each piece and each tensor in a piece more. A
    tensor has some of its own where a number of its own meets it.
    """

    chain: Callable[[], Sequence[Transform]]
    few: int
    a_piece: int = 0
    a_tensor: int = 0
    lists: int = 0  # lists of the size of the update that it needs at once


OF_BILLIONS = {
    "ClipNorm": Counted(lambda: HEADLINE, 14, 2),
    "ClipNorm of gradients": Counted(
        lambda: [ClipNorm(1.0, dim="global", target="grad"), *BEHIND], 13
    ),
    "Guard": Counted(lambda: [Guard(), *BEHIND], 40),
    "SkipSpike": Counted(lambda: [SkipSpike(), *BEHIND], 100),
    "ZClip": Counted(lambda: [ZClip(), *BEHIND], 115, 2),
    "AutoClip": Counted(lambda: [AutoClip(), *BEHIND], 221, 2),
    "AdaGC": Counted(lambda: [AdaGC(), *BEHIND], 53, 1, 1, lists=1),
    "ClipNormByEMA": Counted(lambda: [ClipNormByEMA(0.9), *BEHIND], 57, 1, 4, lists=1),
    "Standardize": Counted(lambda: [Standardize(), LR(0.1)], 87, 1, 6, lists=1),
}


FIRST = ["AdaGC"]  # which has calls of each kind


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FIRST, id="some"),
        pytest.param([x for x in OF_BILLIONS if x not in FIRST], id="others"),
    ],
)
def test_a_large_model_takes_few_pieces_and_few_calls_for_each(names: Sequence[str]) -> None:
    """Memory is as much as two pieces are in float32, and the lists of the update."""
    run_each(keeps_few_calls, "name", names)


def keeps_few_calls(name: str) -> None:
    made, chain = OF_BILLIONS[name], Chain(name, OF_BILLIONS[name].chain)
    assert (len(PIECES), IN_PIECES) == (166, 295)
    small, large = [steps(chain, n, shapes=s, turns=2)[-1] for n, s in ((200, SMALL), SEVEN)]
    assert small.calls <= made.few
    assert large.calls <= made.few + len(PIECES) * made.a_piece + IN_PIECES * made.a_tensor
    assert [*large.of("read", "copy"), *small.of("read", "copy")] == []
    size = 4 * sum(map(math.prod, BILLIONS))
    assert large.peak <= (made.lists + 2 / 128) * size + 2**20


@at_once("name", ["Adam", "LR"])
def test_a_large_model_in_half_precision_is_widened_piece_by_piece(name: str) -> None:
    """Weights and gradients of a piece come to float32 and go back: torch's kernels do the rest."""
    rules = {"Adam": [Adam(), WeightDecay(0.01)], "LR": []}
    chain = Chain(name, lambda: [*rules[name], LR(1e-3)])
    last = steps(chain, SEVEN[0], torch.bfloat16, SEVEN[1], turns=2)[-1]
    assert last.calls <= 5 * len(PIECES) + 2
    assert last.of("read", "copy") == []
    assert last.peak <= 2 * 4 * sum(map(math.prod, BILLIONS)) / 128 + 2**20


@pytest.mark.slow
@at_once("name", [name for name in OF_BILLIONS if name != "Standardize"])
def test_a_compiled_step_of_a_large_model_is_three_to_ten_calls(name: str) -> None:
    chain = Chain(name, OF_BILLIONS[name].chain)
    last = steps(chain, SEVEN[0], shapes=SEVEN[1], engine=COMPILED, turns=REPEATED)[-1]
    assert 3 <= last.calls <= 10
    assert last.of("read", "copy") == []


@at_once("guard", [Guard, lambda: SkipLarge(50.0), SkipSpike])
def test_a_guard_before_a_fused_optimizer_waits_for_nothing(
    guard: Callable[[], Transform],
) -> None:
    *_, last = steps(Chain("guard", lambda: [guard(), *HEADLINE]))
    assert last.of("read", "copy") == []


def test_random_numbers_cannot_be_imagined() -> None:
    """torch makes no generator of a device that is not there: Noise is not proven so."""
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="generator"):
            steps(Chain("noise", lambda: [Noise(0.1), LR(0.1)]))


# --- defects that are planted


class Reads(Transform):
    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(1 / (1 + u.tensors[0].sum().item()))


class Copies(Transform):
    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(torch.tensor(0.5, device=u.tensors[0].device))


class Loops(Transform):
    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.map(torch.tanh)


COUNTER = itertools.count(1)


class Counts(Transform):
    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(0.5 ** next(COUNTER))


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (Reads, "_local_scalar_dense"),
        (Copies, "_to_copy"),
        (Counts, "_foreach_mul"),
        (Loops, "calls"),
    ],
)
def test_a_planted_defect_is_found(planted: type[Transform], words: str) -> None:
    chain = Chain("planted", lambda: [planted(), LR(0.1)])
    with pytest.raises(AssertionError, match=words) as found:
        check(chain, 4, steps(chain, 12))
    if planted is not Loops:
        assert "test_budgets.py" in str(found.value) or "private.py" in str(found.value)
