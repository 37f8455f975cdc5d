"""Install the wheel into empty environments, and run README's first program in each.

    python scripts/wheel_environments.py                      # oldest and newest Python and torch
    python scripts/wheel_environments.py --only newest
    python scripts/wheel_environments.py --python python3.12 --torch 2.13.0

The oldest environment has the oldest supported Python that is installed, and the oldest torch that
`pyproject.toml` allows. The newest one has the newest Python, and the newest torch that pip offers
for it. An empty environment with a CUDA build of torch needs 6 GB while the program runs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.smoke import only, run  # noqa: E402

WARNINGS = ["-W", "error", "-W", "ignore:Failed to initialize NumPy"]  # torch's own, without numpy
VERSION = re.compile(r"^3\.(\d+)")


class Environment(NamedTuple):
    """A Python interpreter, and what pip is asked for as torch."""

    python: str
    torch: str


def interpreters() -> dict[int, str]:
    """Return the interpreters that are installed and supported, by their minor version."""
    lines = (ROOT / "pyproject.toml").read_text()
    oldest = int(re.findall(r'requires-python = ">=3\.(\d+)"', lines)[0])
    found: dict[int, str] = {sys.version_info.minor: sys.executable}
    folders = [Path(folder) for folder in os.get_exec_path()]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders += sorted(pyenv.glob("versions/3.*/bin"))
    for folder in folders:
        for path in folder.glob("python3.*"):
            match = VERSION.match(path.name.removeprefix("python"))
            if match and path.name == f"python3.{match[1]}" and runs(path):
                found.setdefault(int(match[1]), str(path))
    return {minor: path for minor, path in sorted(found.items()) if minor >= oldest}


def runs(python: Path) -> bool:
    """Return whether an interpreter starts and can create environments."""
    command = [str(python), "-c", "import ensurepip, venv"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def oldest_torch() -> str:
    """Return the oldest version of torch that the package allows."""
    lines = (ROOT / "pyproject.toml").read_text()
    return re.findall(r'"torch>=([\d.]+)"', lines)[0] + ".0"


def first_program() -> str:
    """Return the first Python block of README."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]


def described(wheel: Path) -> str:
    """Return the size of the wheel, installed and packed, and its dependencies."""
    with zipfile.ZipFile(wheel) as archive:
        installed = sum(info.file_size for info in archive.infolist())
        (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        lines = archive.read(metadata).decode().split("\n")
    needed = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    needed = sorted(line for line in needed if "extra ==" not in line)
    size = f"{wheel.stat().st_size / 1e6:.1f} MB, installed {installed / 1e6:.1f} MB"
    return f"{wheel.name}: {size}; it depends on {', '.join(needed)}"


def check(environment: Environment, archive: Path) -> None:
    """Install an archive and torch into an empty environment, and run README's first program."""
    with tempfile.TemporaryDirectory() as folder:
        run(environment.python, "-m", "venv", folder, cwd=ROOT)
        python = Path(folder, "bin", "python")
        pip = [
            python,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--no-cache-dir",
        ]
        run(*pip, environment.torch, cwd=ROOT)
        run(*pip, archive, cwd=ROOT)
        # isolated: the source tree cannot stand in for a file that the wheel lacks
        run(python, "-I", *WARNINGS, "-c", first_program(), cwd=Path(folder))
        shown = "import sys, torch; print(sys.version.split()[0], torch.__version__)"
        versions = run(python, "-I", "-c", shown, cwd=Path(folder)).split()
    print(f"{archive.name}: README's first program runs with Python {versions[0]}", end=" ")
    print(f"and torch {versions[1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--only", choices=["oldest", "newest"])
    parser.add_argument("--python", help="the command of an interpreter")
    parser.add_argument("--torch", help="a version of torch")
    given = parser.parse_args()
    found = interpreters()
    oldest = Environment(found[min(found)], f"torch=={oldest_torch()}")
    newest = Environment(found[max(found)], "torch")
    environments = {"oldest": oldest, "newest": newest}
    if given.python or given.torch:
        wanted = f"torch=={given.torch}" if given.torch else "torch"
        environments = {"chosen": Environment(given.python or sys.executable, wanted)}
    elif given.only:
        environments = {given.only: environments[given.only]}
    wheel = only("*.whl")
    print(described(wheel))
    for environment in environments.values():
        check(environment, wheel)
    check(next(iter(environments.values())), only("*.tar.gz"))


if __name__ == "__main__":
    main()
