"""What chains ask of an imagined GPU, and what they may: a table in budgets.txt.

    python -m tests.audit.budgets          # writes the numbers of the table anew
    python -m tests.audit.budgets NAME     # prints those of a rule or a method

A row has a family, and what the dearest of its rules and methods took when it was written: the
calls of a step of twelve small tensors in float32 and in bfloat16, the fresh memory in MiB that is
in use at once in a step of two tensors of 40 MiB, and the calls of a step with `compile=True`, in
the dearer of the two dtypes. Below it stand its members. A tenth more is allowed.
"""

from __future__ import annotations

import itertools
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from tests.modules.rows.row import with_lr
from tests.table import GOOD
from torchzero_clip import Modular, Transform, named
from torchzero_clip.audit import Ledger, fake_cuda, ledgers, twin
from torchzero_clip.engines.compiled.printers import backends
from torchzero_clip.published import NAMES

TABLE = Path(__file__).with_name("budgets.txt")
SMALL = [(32, 16), (16,), (8, 8)]
LARGE = [(2560, 4096), (4096, 2560)]
HEADS = f"{'family':<40}{'calls':>10}{'bfloat16':>10}{'MiB':>10}{'compiled':>10}\n{'-' * 80}\n"
IN = "    "  # before the members of a family
COMPILED = {"compile": True}
REPEATED = 4  # steps, of which the last two are replays where a chain is replayed
OF_MATRICES = ("muo", "nanochat", "dion", "polar", "scion", "kimi", "glm")
MATRICES = [name for name in NAMES if any(part in name for part in OF_MATRICES)]


@dataclass(frozen=True)
class Chain:
    """A chain, of a construction of a rule or of a method."""

    name: str
    make: Callable[[], Sequence[Transform]]
    matrices: bool = False
    draws: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def kind(self) -> str:
        """The name that it has in the table: that of the class, or of the method."""
        return self.name.partition("-")[0]


def rules(every: bool = False) -> list[Chain]:
    """The first construction of each class of the contract table, or every one, before LR."""
    first = {case.cls: case for case in reversed(GOOD)}
    cases = GOOD if every else [case for case in GOOD if first[case.cls] is case]
    return [
        Chain(str(case), lambda case=case: with_lr(case.make(), 0.1), case.matrices, case.draws)
        for case in cases
    ]


def names() -> list[Chain]:
    """Every published method."""
    return [Chain(name, lambda name=name: [named(name)], name in MATRICES) for name in NAMES]


CHAINS = [chain for chain in [*rules(), *names()] if not chain.draws]


def steps(
    chain: Chain,
    count: int = 12,
    dtype: torch.dtype = torch.float32,
    shapes: Sequence[Any] = SMALL,
    engine: Any = None,
    turns: int = 3,
) -> list[Ledger]:
    """The ledgers of some steps of a model; an engine is one of `Modular`'s options."""
    some = [shape for shape in shapes if len(shape) > 1 or not chain.matrices]
    forms = [torch.empty(s, dtype=dtype) for s in itertools.islice(itertools.cycle(some), count)]
    with fake_cuda(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        params = twin(forms)
        rows = [(f"l{i // 2}.{('weight', 'bias')[i % 2]}", p) for i, p in enumerate(params)]
        return ledgers(lambda _: Modular(rows, *chain.make(), **(engine or {})), params, turns)


def memory(chain: Chain) -> float:
    """The MiB that are in use at once in a step of a large model."""
    return steps(chain, 2, shapes=LARGE)[-1].peak / 2**20


class Budget(NamedTuple):
    """What a step takes, or may take."""

    calls: int
    half: int  # calls in bfloat16
    mib: int
    compiled: int  # calls with `compile=True`

    def of(self, dtype: torch.dtype) -> int:
        """The calls in a dtype."""
        return self.half if dtype == torch.bfloat16 else self.calls

    @property
    def with_air(self) -> Budget:
        """A tenth more."""
        return Budget(*[n + n // 10 for n in self])


class Family(NamedTuple):
    """Rules and methods of one kind, of which none takes more than the dearest did."""

    name: str
    most: Budget
    members: list[str]

    def __str__(self) -> str:
        numbers = "".join([f"{n:>10}" for n in self.most])
        lines = [f"{IN}{line}\n" for line in textwrap.wrap(", ".join(self.members), 86)]
        return f"{self.name:<40}{numbers}\n{''.join(lines)}"

    def measured(self, taken: Mapping[str, Budget]) -> Family:
        """The family with what its dearest takes now."""
        columns = zip(*[taken[member] for member in self.members], strict=True)
        return self._replace(most=Budget(*map(max, columns)))


def families() -> list[Family]:
    """The table."""
    found: list[Family] = []
    for line in TABLE.read_text().splitlines()[2:]:
        if line.startswith(IN):
            found[-1].members.extend(line.replace(",", " ").split())
        else:
            name, *numbers = line.rsplit(maxsplit=4)
            found.append(Family(name.strip(), Budget(*map(int, numbers)), []))
    return found


def budgets() -> dict[str, Budget]:
    """What each rule and method may take."""
    return {member: family.most.with_air for family in families() for member in family.members}


def main(names: Sequence[str]) -> None:
    mock.patch.object(backends.triton, "here", return_value=True).start()  # no kernel is run
    taken = {}
    for chain in CHAINS:
        if not names or chain.kind in names:
            taken[chain.kind] = measured(chain)
            print(f"{chain.kind:<30}{taken[chain.kind]}", flush=True)
    if not names:
        TABLE.write_text(HEADS + "".join([str(family.measured(taken)) for family in families()]))


def measured(chain: Chain) -> Budget:
    """What a step of a chain takes."""
    single, half, *compiled = [
        steps(chain, dtype=dtype, engine=engine, turns=turns)[-1].calls
        for engine, turns in (({}, 3), (COMPILED, REPEATED))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    return Budget(single, half, round(memory(chain)), max(compiled))


if __name__ == "__main__":
    main(sys.argv[1:])
