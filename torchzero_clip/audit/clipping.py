"""Is a norm right? A clip function against gradients that are known, in processes on gloo."""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchzero_clip.audit.cases import ALONE, RANKS, TOGETHER, ClipCase
from torchzero_clip.core.private import TorchDispatchMode, tree_leaves

FRESH = 1.75  # fresh memory that a clip may take, in gradients of a rank
MEASURED = 2**15  # bytes of gradients whose memory is compared
PATIENCE = 20  # seconds that a rank waits for the others
LIMIT = 600  # seconds that all cases of a function may take
MODULE = "torchzero_clip.audit.clipping"
INSIDE = "TORCHZERO_CLIP_AUDIT"  # set in the processes of an audit


@dataclass(frozen=True)
class ClipRow:
    """What one case found.

    Attributes:
        case: Its name.
        right: Whether all is as it should be.
        expected: The norm of the gradients.
        found: The norm that the function returned on the first rank where it was wrong, or on
            rank 0; None where it returned nothing or raised.
        fresh: The most memory that it took at once, in gradients of a rank; None where these are
            too few to say.
        why: What is wrong, and the likely cause where it is known.
    """

    case: str
    right: bool
    expected: float
    found: float | None
    fresh: float | None
    why: str = ""


@dataclass(frozen=True)
class ClipReport:
    """What an audit found; as text a table.

    Attributes:
        name: The function.
        rows: One for each case.
    """

    name: str
    rows: list[ClipRow]

    @property
    def right(self) -> bool:
        """Whether every case is."""
        return all([row.right for row in self.rows])

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"function": self.name, "cases": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        wide = max([len(row.case) for row in self.rows], default=0)
        lines = [f"{self.name}: {sum([row.right for row in self.rows])} of {len(self.rows)} right"]
        lines.append(f"  {'':<{wide}}   {'expected':>10} {'found':>10} {'memory':>7}")
        for row in self.rows:
            found = "none" if row.found is None else f"{row.found:.5g}"
            mark = "✓" if row.right else "✗"
            fresh = "" if row.fresh is None else f"{row.fresh:.2f}"
            numbers = f"{row.expected:>10.5g} {found:>10} {fresh:>7}"
            lines.append(f"{mark} {row.case:<{wide}}   {numbers}  {row.why}".rstrip())
        return "\n".join(lines)


def audit_clip(
    function: Callable[..., Any] | str, cases: Sequence[str] | None = None
) -> ClipReport:
    """Try a clip function on gradients whose norm is known, whole and cut over four processes.

    It is called as `function(parameters, max_norm)`, must scale `p.grad` in place and may return
    the norm. One that has an argument `case` gets more: `case.model`, and `case.group`, the
    processes that hold the other stages of a pipeline. Processes import it by its name.

    Args:
        function: The function, or "package.module:name", or "file.py:name".
        cases: The names of some cases; all unless they are given.

    Example:
        >>> import torch
        >>> from torchzero_clip.audit import audit_clip
        >>> report = audit_clip(torch.nn.utils.clip_grad_norm_, ["whole", "entries of 1e30"])
        >>> [row.right for row in report.rows]
        [True, False]
    """
    return audits([function], cases)[0]


def audits(
    functions: Sequence[Callable[..., Any] | str], cases: Sequence[str] | None = None
) -> list[ClipReport]:
    """The reports of several functions, which the same processes try in turn while they can."""
    known = [*ALONE, *TOGETHER]
    wanted = known if cases is None else list(cases)
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"audit_clip: there is no case {unknown[0]!r}; there are {known}")
    if INSIDE in os.environ:
        raise RuntimeError(
            "audit_clip was called again by a process of its own, which imports the file of the "
            "function: put the call below `if __name__ == '__main__':`"
        )
    names = [x if isinstance(x, str) else _name_of(x) for x in functions]
    jobs = [
        (name, case)
        for kind in (ALONE, TOGETHER)
        for name in names
        for case in wanted
        if case in kind
    ]
    found: list[tuple[dict[str, Any] | None, ...]] = []
    end = time.monotonic() + LIMIT * len(names)
    while len(found) < len(jobs):
        found += _begun(jobs[len(found) :], names, end)
    rows = {job: _row(job[1], ranks) for job, ranks in zip(jobs, found, strict=True)}
    return [ClipReport(name, [rows[name, case] for case in wanted]) for name in names]


def _begun(
    jobs: Sequence[tuple[str, str]], names: Sequence[str], end: float
) -> list[tuple[dict[str, Any] | None, ...]]:
    """What every rank found in the first of the jobs, and in as many more as processes can do."""
    ranks = RANKS if any([case in TOGETHER for _, case in jobs]) else 1
    with tempfile.TemporaryDirectory() as folder:
        started = [begin([json.dumps([jobs, folder, ranks]), str(rank)]) for rank in range(ranks)]
        try:
            said = [
                process.communicate(timeout=max(end - time.monotonic(), 0))[1]
                for process in started
            ]
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"audit_clip: {', '.join(names)} took more than {LIMIT * len(names)} s: try its "
                "cases one by one"
            ) from None
        finally:
            for process in started:
                process.kill()
        files = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        if lost := [i for i, file in enumerate(files) if not file.exists()]:
            raise RuntimeError(
                f"audit_clip: {', '.join(names)} ended early: {_last(said[lost[0]])}"
            )
        return list(zip(*[json.loads(file.read_text()) for file in files], strict=True))


def begin(arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Start the process of a rank."""
    search = os.pathsep.join([os.getcwd(), *[path for path in sys.path if path]])
    home = {**os.environ, INSIDE: "1", "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, *arguments],
        env=home,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def _name_of(function: Callable[..., Any]) -> str:
    """The name by which another process imports a function."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if module is None or "<" in name:
        raise TypeError(
            "audit_clip: its processes import the function by its name, so it must be one at the "
            f"top of a module, got {function!r}: give it a `def` of its own"
        )
    if module == "__main__":
        module = inspect.getfile(function)
    return f"{module}:{name}"


def _last(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


def _row(case: str, ranks: Sequence[dict[str, Any] | None]) -> ClipRow:
    """One row from what the ranks found; a case in one process has rank 0 alone."""
    told = [one for one in ranks if one is not None]
    wrong = [one for one in told if one["why"]]
    first = (wrong or told)[0]
    why = first["why"]
    norms = {x for one in told if (x := one["found"]) is not None and x == x}
    if not why and norms and max(norms) > min(norms) * (1 + 1e-6):
        why = f"ranks disagree: {sorted(norms)}"
    elif why and len(wrong) < len(told):
        why += f"; on {len(wrong)} of {len(told)} ranks"
    fresh = max([one["fresh"] for one in told if one["fresh"] is not None], default=None)
    return ClipRow(case, not why, first["expected"], first["found"], fresh, why)


# ---------------------------------------------------------------------- inside a process


class Fresh(TorchDispatchMode):
    """The most memory that was reserved at once since the block began."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak, self._alive = 0, {0: 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any([kind.__name__ == "DTensor" for kind in types]):  # it comes again, as its parts
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        old = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        for t in _tensors(out):
            memory = t.untyped_storage()
            if memory.data_ptr() not in old and memory.data_ptr() not in self._alive:
                self._reserve(memory)
        return out

    def _reserve(self, memory: torch.UntypedStorage) -> None:
        place, alive = memory.data_ptr(), self._alive
        alive[place] = memory.nbytes()
        self.peak = max(self.peak, sum(alive.values()))
        weakref.finalize(memory, alive.pop, place, None)


def _tensors(x: Any) -> list[Tensor]:
    return [t for t in tree_leaves(x) if type(t) in (Tensor, torch.nn.Parameter)]


def tried(function: Callable[..., Any], case: ClipCase) -> dict[str, Any]:
    """What a function does in one case, on this rank."""
    wanted = 1.0 if case.bad or case.norm == 0 else case.share * case.norm
    before = [t.clone() for t in case.here] if case.norm and not case.bad else []
    more = {"case": case} if "case" in _arguments(function) else {}
    bytes_here = sum([t.numel() * t.element_size() for t in case.here])
    with Fresh() as fresh:
        returned = function(iter(case.params) if case.once else case.params, wanted, **more)
    found = None if returned is None else float(_whole(returned))
    del returned
    out: dict[str, Any] = {"expected": case.norm, "found": found, "why": ""}
    out["fresh"] = fresh.peak / bytes_here if bytes_here >= MEASURED else None
    if case.bad:
        if found is not None and math.isfinite(found):
            out["why"] = f"a gradient that is no number has the norm {found:.4g}"
        return out
    if found is not None and not _near(found, case.norm, case.loose):
        out["why"] = _cause(found, case)
        return out
    keep = min(case.share, 1.0)
    pairs = [(a, b * keep) for a, b in zip(case.here, before, strict=False)]
    ratios = [(a.double().norm() / b.double().norm()).item() for a, b in pairs if a.numel()]
    off = [x for x in ratios if not _near(x, 1.0, max(2 * case.loose, 1e-3))]
    if off:
        out["why"] = f"gradients are {off[0]:.4g} of what they should be"
        if found is None:
            cause = _cause(case.norm / off[0], case).partition(": ")[2]
            out["why"] += f": {cause}" if cause else ""
    elif keep == 1 and not all([torch.equal(a, b) for a, b in pairs]):
        out["why"] = "gradients within the limit are not what they were, bit for bit"
    elif out["fresh"] is not None and out["fresh"] > FRESH:
        out["why"] = f"it takes {out['fresh']:.1f} times the memory of the gradients here"
    return out


def _whole(norm: Any) -> Any:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _near(x: float, y: float, loose: float) -> bool:
    return math.isclose(x, y, rel_tol=loose)


def _cause(found: float, case: ClipCase) -> str:
    """What is wrong about a norm, and why where a known mistake finds the same."""
    ratio = found / case.norm if case.norm else math.inf
    known = [
        name
        for name, norm in case.mistakes.items()
        if (norm == found or _near(norm, found, 1e-4)) and not _near(norm, case.norm, case.loose)
    ]
    what = f"the norm is {ratio:.4g} of the right one"
    return f"{what}: {known[0]}" if known else what


def _arguments(function: Callable[..., Any]) -> Sequence[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def found_by(name: str) -> Callable[..., Any]:
    """The function of a name like "package.module:name" or "file.py:name"."""
    home, _, path = name.rpartition(":")
    if not home or not path:
        raise ValueError(f"a function is named package.module:name or file.py:name, got {name!r}")
    if home.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(home).stem, home)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(home)
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    if not callable(value):
        raise TypeError(f"{name} is no function, but {value!r}")
    function: Callable[..., Any] = value
    return function


def _one(function: Callable[..., Any], make: Callable[[], ClipCase]) -> dict[str, Any]:
    """A case on this rank; an error is a finding."""
    case = make()
    try:
        return {**tried(function, case), "raised": False}
    except Exception as error:
        why = f"{type(error).__name__}: {_first(str(error))}"
        return {"expected": case.norm, "found": None, "fresh": None, "why": why, "raised": True}


def _first(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 100 else line[:97] + "..."


def work(jobs: Sequence[tuple[str, str]], folder: str, ranks: int, rank: int) -> None:
    """Cases on one rank, those in one process on rank 0.

    After an error, or where ranks part, they may wait for each other. The rest is for new
    processes: in these a second group would meet what DTensor, or a function, keeps of the first.
    """
    torch.set_num_threads(1)
    functions = {name: found_by(name) for name, _ in jobs}
    found: list[dict[str, Any] | None] = []
    for i, (name, case) in enumerate(jobs):
        if case in ALONE:
            found.append(_one(functions[name], ALONE[case]) if rank == 0 else None)
            continue
        if not dist.is_initialized():
            _told(Path(folder, "alone"), "", ranks, rank)
            dist.init_process_group(
                "gloo",
                init_method=Path(folder, "store").as_uri(),
                rank=rank,
                world_size=ranks,
                timeout=datetime.timedelta(seconds=PATIENCE),
            )
        row = _one(functions[name], TOGETHER[case])
        found.append(row)
        ends = _told(Path(folder, f"done{i}"), f"{row['raised']} {row['why'] == ''}", ranks, rank)
        if row["raised"] or len(set(ends)) > 1:
            break
    if dist.is_initialized():
        dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def _told(file: Path, text: str, ranks: int, rank: int) -> list[str]:
    """The texts of all ranks, by way of files, since their sockets may be out of step."""
    part, end = file.with_suffix(f".part{rank}"), time.monotonic() + 30 * PATIENCE
    part.write_text(text)
    part.rename(file.with_suffix(f".{rank}"))
    every = [file.with_suffix(f".{r}") for r in range(ranks)]
    while not all([other.exists() for other in every]):
        if time.monotonic() > end:
            raise RuntimeError(f"rank {rank} waited in vain for the others")
        time.sleep(0.002)
    return [other.read_text() for other in every]


if __name__ == "__main__":
    jobs, folder, ranks = json.loads(sys.argv[1])
    work(jobs, folder, ranks, int(sys.argv[2]))
