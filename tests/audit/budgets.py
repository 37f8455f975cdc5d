"""What chains ask of an imagined GPU, and what they may: a table in budgets.txt.

    python -m tests.audit.budgets          # writes the table anew
    python -m tests.audit.budgets --new    # adds the rows of new chains, and keeps the others

A row has a chain, the calls of a step of twelve small tensors in float32 and in bfloat16, the
fresh memory in MiB that is in use at once in a step of two tensors of 40 MiB, and the calls of a
step with `compile=True`, in float32 and in bfloat16. A change that costs more edits its row.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.modules.rows.row import with_lr
from tests.table import GOOD
from torchzero_clip import Modular, Transform, named
from torchzero_clip.audit import Ledger, fake_cuda, ledgers, twin
from torchzero_clip.published import NAMES

TABLE = Path(__file__).with_name("budgets.txt")
SMALL = [(32, 16), (16,), (8, 8)]
LARGE = [(2560, 4096), (4096, 2560)]
COMPILED = {"compile": True}
REPLAYED = 4  # steps, of which the last two are replays where a chain is replayed
OF_MATRICES = ("muo", "nanochat", "dion", "polar", "scion")
MATRICES = [name for name in NAMES if any(part in name for part in OF_MATRICES)]


@dataclass(frozen=True)
class Chain:
    """A chain, under the name that it has in the table."""

    name: str
    make: Callable[[], Sequence[Transform]]
    matrices: bool = False
    draws: bool = False

    def __str__(self) -> str:
        return self.name


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


def budgets() -> dict[str, tuple[int, ...]]:
    """The table."""
    rows = [line.rsplit(maxsplit=5) for line in TABLE.read_text().splitlines()[2:]]
    return {name: tuple(map(int, numbers)) for name, *numbers in rows}


def main(new: bool = False) -> None:
    heads = f"{'calls':>8}{'bfloat16':>10}{'MiB':>8}{'compiled':>10}{'bfloat16':>10}"
    lines = [f"{'chain':<34}{heads}", "-" * 80]
    known = budgets() if new else {}
    for chain in CHAINS:
        calls, half, mib, compiled, half_compiled = known.get(chain.name) or measured(chain)
        eager = f"{calls:>8}{half:>10}{mib:>8.0f}"
        lines.append(f"{chain.name:<34}{eager}{compiled:>10}{half_compiled:>10}")
        print(lines[-1], flush=True)
    TABLE.write_text("\n".join(lines) + "\n")


def measured(chain: Chain) -> tuple[int, ...]:
    """The row of a chain."""
    calls, half, compiled, half_compiled = [
        steps(chain, dtype=dtype, engine=engine, turns=turns)[-1].calls
        for engine, turns in (({}, 3), (COMPILED, REPLAYED))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    return calls, half, round(memory(chain)), compiled, half_compiled


if __name__ == "__main__":
    main(new="--new" in sys.argv)
