"""How many of 60 small mistakes in the package do the quick tests find?

    python scripts/detection.py draw --seed 1   # choose 60 changes of the code
    python scripts/detection.py record          # note which test files enter the changed functions
    python scripts/detection.py run             # make each change in a copy, run the quickest files
    python scripts/detection.py together        # run all quick tests with the changes that are left
    python scripts/detection.py table           # print what found each change

A change is one of seven kinds: a sign, an off-by-one, the wrong branch, a missing copy, a dropped
collective, two arguments in the wrong order, and a cache that is not renewed. The sample and its
results are in `tests/detection.json`, so that a change of the tests can be judged: `run` first runs
the test that found a mistake before, and needs other files only if that test is gone.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchzero_clip"
PAGE = ROOT / "tests" / "detection.json"
PER_AREA = 12
AREAS = {
    "engines": ("engines/",),
    "norms": ("core/norms/", "core/norm_rule.py", "core/units.py", "core/unit_state.py"),
    "sharding": ("core/sharding/", "core/norms/shards.py", "core/division.py"),
    "checkpoints": (
        "optimizer/checkpoint.py",
        "optimizer/fingerprint.py",
        "optimizer/loading.py",
        "optimizer/saving.py",
        "optimizer/state_layout.py",
        "optimizer/takeover.py",
        "recovering/snapshot.py",
    ),
    "formats": (
        "core/formats/",
        "core/layout_patterns.py",
        "core/logical_matrices.py",
        "engines/compiled/lists/storage_formats.py",
        "engines/kept.py",
        "optimizer/exact_weights.py",
        "optimizer/rounding.py",
    ),
}
"""The files of each area. A file belongs to the last area that names it."""
ON_DEVICES = ("captures.py", "device_step.py", "pointer_tables.py", "launches.py", "triton")
"""Files that only GPUs and `make test-triton` enter."""
COLLECTIVES = {"gather", "exchange", "sum_", "all_reduce", "all_gather", "broadcast", "barrier"}
COPIES = {"clone", "copy", "deepcopy", "list", "dict", "detach"}
FREE_ORDER = {"isinstance", "cast", "zip", "map", "to", "hasattr", "getattr", "issubclass"}
"""Calls in which exchanged arguments are an error at once, or the same."""
OPPOSITE: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
NEXT: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
WORDS = "cache|key|stale|version|known|kept|made|_last|same|fresh|current"
CACHE = re.compile(WORDS, re.IGNORECASE)
"""Conditions that may decide whether stored values are used."""
SHORT = 15.0
LONG = 45.0
"""Seconds of quick test files that run with one change: first the shorter, then the longer."""
NO_TESTS = 5
"""pytest's exit status if no test was selected."""
LIMIT = 900
"""Seconds after which a run with a change counts as failed: some mistakes never end."""


@dataclass
class Change:
    """One change of one function.

    Attributes:
        file: The file inside the package.
        function: The function, with its classes.
        kind: What kind of mistake it is.
        area: The part of the library.
        old: The code before.
        new: The code after.
        index: Which of the places in the function with this code is changed.
        entered_by: The quick test files that enter the function.
        found_by: The first test that fails, or the empty string.
        reason: Why no quick test finds it, for a change that survives.
    """

    file: str
    function: str
    kind: str
    area: str
    old: str
    new: str
    index: int
    entered_by: list[str] = field(default_factory=list)
    found_by: str = ""
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.file} {self.function}: {self.old}  →  {self.new}"

    def applied(self, text: str) -> str:
        """Return the text of the file with the change."""
        function = functions_of(ast.parse(text))[self.function]
        places = [
            n for n, kind, new in changes_of(function) if (kind, new) == (self.kind, self.new)
        ]
        places = [node for node in places if ast.unparse(node) == self.old]
        return replaced(text, places[self.index], self.new)

    def probed(self, text: str, number: int) -> str:
        """Return the text of the file with a call at the start of the function."""
        function = functions_of(ast.parse(text))[self.function]
        documented = ast.get_docstring(function) is not None and len(function.body) > 1
        first = function.body[1 if documented else 0]
        lines = text.split("\n")
        probe = " " * first.col_offset + f'__import__("entered").enter({number})'
        lines.insert(first.lineno - 1, probe)
        return "\n".join(lines)


# ---------------------------------------------------------------------- changes


def functions_of(tree: ast.AST, prefix: str = "") -> dict[str, ast.FunctionDef]:
    """Return all functions of a module by their names, those inside of classes with the class."""
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            found |= functions_of(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            found.setdefault(prefix + node.name, node)
    return found


def changes_of(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield each node of a function that can be changed, the kind of mistake, and the new code."""
    for statement in function.body:
        for node in ast.walk(statement):
            yield from changes_of_node(node)


def changes_of_node(node: ast.AST) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield the mistakes that could stand in place of a node or of a part of it."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPPOSITE and not is_of_text(node):
        yield node, "a sign", ast.unparse(changed(node, op=OPPOSITE[type(node.op)]()))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node, "a sign", ast.unparse(node.operand)
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in NEXT:
        yield node, "off by one", ast.unparse(changed(node, ops=[NEXT[type(node.ops[0])]()]))
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield node, "off by one", str(node.value + 1)
    elif isinstance(node, ast.If) and not is_check(node):
        words = ast.unparse(node.test)
        yield node.test, "the other branch", f"not ({words})"
        if CACHE.search(words) and len(node.body) <= 4:
            yield node.test, "a stale cache", f"({words}) and False"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        if is_collective(node.value):
            yield node, "a dropped collective", "pass"
        elif called(node.value) in ("clear", "pop", "cache_clear"):
            yield node, "a stale cache", "pass"
    elif isinstance(node, ast.Call):
        yield from changes_of_call(node)


def changes_of_call(node: ast.Call) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield the mistakes that could stand in place of a call."""
    name = called(node)
    if name in COPIES:
        if isinstance(node.func, ast.Attribute) and not node.args:
            yield node, "a missing copy", ast.unparse(node.func.value)
        elif len(node.args) == 1 and isinstance(node.args[0], (ast.Name, ast.Attribute)):
            yield node, "a missing copy", ast.unparse(node.args[0])
    elif is_collective(node) and node.args:
        yield node, "a dropped collective", ast.unparse(node.args[0])
    elif name not in FREE_ORDER:
        names = [arg for arg in node.args if isinstance(arg, (ast.Name, ast.Attribute))]
        if len(names) == len(node.args) >= 2 and ast.dump(names[0]) != ast.dump(names[1]):
            other = changed(node, args=[names[1], names[0], *names[2:]])
            yield node, "swapped arguments", ast.unparse(other)


def is_collective(node: ast.Call) -> bool:
    """Return whether a call communicates. Tensors have a method `gather`, which does not."""
    of_torch = ast.unparse(node.func).startswith("torch.distributed.")
    return called(node) in COLLECTIVES and (of_torch or isinstance(node.func, ast.Name))


def is_check(node: ast.If) -> bool:
    """Return whether a branch raises an error, so that its change would be seen at once."""
    return any(isinstance(part, ast.Raise) for part in node.body)


def is_of_text(node: ast.BinOp) -> bool:
    """Return whether a sum joins texts, lists or tuples."""
    parts = (node.left, node.right)
    if any(isinstance(part, (ast.JoinedStr, ast.List, ast.Tuple)) for part in parts):
        return True
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts)


def called(node: ast.Call) -> str:
    """Return the last part of the name of what is called."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def changed(node: Any, **fields: Any) -> Any:
    """Return a copy of a node with other fields."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def replaced(text: str, node: Any, new: str) -> str:
    """Return a text with other code in the place of a node."""
    lines = text.split("\n")
    first = lines[node.lineno - 1].encode()[: node.col_offset].decode()
    last = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
    code = new if new == "pass" else f"({new})"
    lines[node.lineno - 1 : node.end_lineno] = [first + code + last]
    return "\n".join(lines)


def area_of(file: str) -> str | None:
    """Return the area of a file of the package, or None."""
    found = None
    for area, starts in AREAS.items():
        if file.startswith(starts):
            found = area
    return None if any(name in file for name in ON_DEVICES) else found


def drawn(seed: int) -> list[Change]:
    """Draw a sample: as many changes in each area, and in an area of each kind in turn."""
    rng = random.Random(seed)
    by_area: dict[str, dict[str, list[Change]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        area = area_of(file)
        if area is not None:
            for change in changes_in(file, area, path.read_text()):
                by_area[area][change.kind].append(change)
    sample: list[Change] = []
    for area in AREAS:
        piles = [pile for _, pile in sorted(by_area[area].items())]
        for pile in piles:
            rng.shuffle(pile)
        rng.shuffle(piles)
        in_turn = [pile[i] for i in range(PER_AREA) for pile in piles if i < len(pile)]
        sample += in_turn[:PER_AREA]
    return sample


def changes_in(file: str, area: str, text: str) -> Iterator[Change]:
    """Yield all changes of a file."""
    for name, function in functions_of(ast.parse(text)).items():
        seen: Counter[tuple[str, str, str]] = Counter()
        for node, kind, new in changes_of(function):
            old = ast.unparse(node)
            change = Change(file, name, kind, area, old, new, seen[kind, old, new])
            seen[kind, old, new] += 1
            if "\n" not in old + new and compiles(change.applied(text)):
                yield change


def compiles(text: str) -> bool:
    """Return whether a text is Python."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


# ---------------------------------------------------------------------- runs


class Copy:
    """A copy of the project's files in which changes are made and tests run."""

    def __init__(self, folder: str) -> None:
        self.root = Path(folder)
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in names.split("\n"):
            if name and (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)

    def write(self, file: str, text: str) -> None:
        """Replace the text of a file of the package."""
        (self.root / "torchzero_clip" / file).write_text(text)

    def pytest(
        self, *words: str, limit: int = LIMIT, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run pytest in the copy."""
        paths = [str(self.root), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        known = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
        known["PYTHONDONTWRITEBYTECODE"] = (
            "1"  # a change within one second keeps the old file's age
        )
        command = ["timeout", str(limit), sys.executable, "-m", "pytest", "-q", "-ra", *words]
        return subprocess.run(
            command, cwd=self.root, env=known, capture_output=True, text=True, check=False
        )


ENTERED = """
import os

seen = set()

def enter(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    if (number, test) not in seen:
        seen.add((number, test))
        with open(os.environ["ENTERED"], "a") as file:
            file.write(f"{number} {test}\\n")
"""


def record(sample: Sequence[Change], paths: Sequence[str]) -> None:
    """Run quick tests once, and note for each change which files enter its function."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Copy(folder)
        (copied.root / "entered.py").write_text(ENTERED)
        log = copied.root / "entered.txt"
        log.touch()
        texts: dict[str, str] = {}
        for number, change in enumerate(sample):
            text = texts.get(change.file, (PACKAGE / change.file).read_text())
            texts[change.file] = change.probed(text, number)
        for file, text in texts.items():
            copied.write(file, text)
        done = copied.pytest(
            "-n", "2", "--dist", "loadfile", *paths, limit=4 * LIMIT, ENTERED=str(log)
        )
        print(done.stdout[-1500:])
        lines = [line.split(" ", 1) for line in log.read_text().split("\n") if line]
    for number, change in enumerate(sample):
        entered = {test for n, test in lines if int(n) == number and test}
        change.entered_by = sorted({*change.entered_by, *entered})


def judged(change: Change, seconds: dict[str, float]) -> str:
    """Return the first test that fails with a change, or the empty string.

    Only the quickest files run here: `together` runs all files with the changes that are left.
    """
    with tempfile.TemporaryDirectory() as folder:
        copied = Copy(folder)
        copied.write(change.file, change.applied((PACKAGE / change.file).read_text()))
        file = change.found_by.partition("::")[0]
        if file and (copied.root / file).exists():
            done = copied.pytest("-x", change.found_by)
            if done.returncode == 1:
                return failing(done.stdout)[0]
        here = [name for name in change.entered_by if (copied.root / name).exists()]
        here.sort(key=lambda name: seconds.get(name, 1.0))
        for most in (SHORT, LONG):
            files = first_files(here, seconds, most)
            here = here[len(files) :]
            if files:
                done = copied.pytest("-x", *files)
                if done.returncode not in (0, NO_TESTS):
                    return failing(done.stdout)[0]
    return ""


def first_files(files: Sequence[str], seconds: dict[str, float], most: float) -> list[str]:
    """Return the first files that take so many seconds together."""
    total = 0.0
    found = []
    for name in files:
        total += seconds.get(name, 1.0)
        if total > most:
            break
        found.append(name)
    return found


def failing(output: str) -> list[str]:
    """Return the tests that failed, without their parameters, by what pytest printed."""
    found = re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", output, re.MULTILINE)
    return list(dict.fromkeys(found)) or ["a run that did not end"]


def run(
    sample: Sequence[Change],
    workers: int,
    seconds: dict[str, float],
    only: Sequence[int] | None = None,
) -> None:
    """Judge every change or only some, so many at once, and save after each."""

    def judge(change: Change) -> None:
        start = time.perf_counter()
        change.found_by = judged(change, seconds)
        took = time.perf_counter() - start
        save(sample)
        print(f"{took:4.0f} s  {change.found_by or 'not yet found'}  {change}", flush=True)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(judge, sample if only is None else [sample[i] for i in only]))


def together(sample: Sequence[Change]) -> None:
    """Run all quick tests with all changes that were not found, at once.

    Then run each test that failed with each change alone.
    """
    left = [change for change in sample if not change.found_by]
    with tempfile.TemporaryDirectory() as folder:
        copied = Copy(folder)
        texts: dict[str, str] = {}
        for change in left:
            text = texts.get(change.file, (PACKAGE / change.file).read_text())
            texts[change.file] = change.applied(text)
        for file, text in texts.items():
            copied.write(file, text)
        done = copied.pytest("-n", "2", "--dist", "loadfile", limit=4 * LIMIT)
        print(done.stdout[-4000:])
    if done.returncode == 0:
        return
    tests = failing(done.stdout)
    for change in left:
        with tempfile.TemporaryDirectory() as folder:
            copied = Copy(folder)
            copied.write(change.file, change.applied((PACKAGE / change.file).read_text()))
            alone = copied.pytest("-x", *tests)
            if alone.returncode == 1:
                change.found_by = failing(alone.stdout)[0]
                save(sample)
        print(f"{change.found_by or 'SURVIVES'}  {change}", flush=True)


def table(sample: Sequence[Change]) -> None:
    """Print what found each change, and counts by area and kind."""
    for change in sample:
        print(f"{change.found_by or 'SURVIVES: ' + change.reason}\n    {change.kind}: {change}")
    for name in ("area", "kind"):
        print()
        for value in sorted({getattr(change, name) for change in sample}):
            those = [change for change in sample if getattr(change, name) == value]
            found = sum(bool(change.found_by) for change in those)
            print(f"{value}: {found} of {len(those)}")
    print(f"\nfound: {sum(bool(change.found_by) for change in sample)} of {len(sample)}")


def load() -> list[Change]:
    """Read the sample."""
    return [Change(**row) for row in json.loads(PAGE.read_text())]


def save(sample: Sequence[Change]) -> None:
    """Write the sample."""
    PAGE.write_text(json.dumps([asdict(change) for change in sample], indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("what", choices=["draw", "record", "run", "together", "table"])
    parser.add_argument("paths", nargs="*", help="for record: folders or files of tests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of changes to run")
    parser.add_argument("--seconds", type=Path, help="seconds by test, of scripts/profile_tests.py")
    given = parser.parse_args()
    if given.what == "draw":
        save(drawn(given.seed))
        return 0
    sample = load()
    if given.what == "record":
        record(sample, given.paths)
        save(sample)
    elif given.what == "run":
        by_file: Counter[str] = Counter()
        if given.seconds:
            for test, taken in json.loads(given.seconds.read_text()).items():
                by_file[test.partition("::")[0]] += taken
        run(sample, given.workers, dict(by_file), given.only)
    elif given.what == "together":
        together(sample)
    table(sample)
    return 0


if __name__ == "__main__":
    sys.exit(main())
