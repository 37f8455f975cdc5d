"""Whether what lies in dist/ is complete: install the wheel and the sdist elsewhere and use them.

The packages around them, torch above all, are those of this environment. What is installed goes
into a folder of its own, in front of everything else, and Python is started in isolated mode, so
that the source tree cannot stand in for a file that is missing.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = [sys.executable, "-I"]

USE = """
import io, runpy, sys
sys.path.insert(0, sys.argv[1])
import torch, torchzero_clip as tz
assert tz.__file__.startswith(sys.argv[1]), tz.__file__

def start():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    chain = tz.ZClip(warmup_steps=2), tz.ClipNorm(1.0), tz.Adam(), tz.LR(0.1)
    opt = tz.Modular(model.parameters(), *chain)
    return model, opt, tz.schedule(opt, "ClipNorm/max_norm", lambda step: 1.0 / (1 + step))

def train(steps, model, opt, limit):
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
        limit.step()
    return model, opt, limit

whole, half = train(range(6), *start()), train(range(3), *start())
file = io.BytesIO()
torch.save([part.state_dict() for part in half], file)
file.seek(0)
resumed = start()
for part, state in zip(resumed, torch.load(file, weights_only=True)):
    part.load_state_dict(state)
train(range(3, 6), *resumed)
assert torch.equal(whole[0].weight, resumed[0].weight), "a resumed run is another"

w = torch.nn.Parameter(torch.zeros(2))
opt = torch.optim.SGD([w], lr=1.0)
handle = tz.attach(opt, tz.ClipNorm(1.0))
w.grad = torch.tensor([3.0, 4.0])
opt.step()
assert torch.allclose(w, torch.tensor([-0.6, -0.8])), w

from torchzero_clip.audit import fake_cuda, ledgers, twin
with fake_cuda():
    chain = tz.ClipNorm(1.0), tz.Adam(), tz.LR(0.1)
    *_, last = ledgers(lambda some: tz.Modular(some, *chain), twin([w]))
assert last.calls and not last.reads + last.copies, last.requests
from torchzero_clip.study.lab import server, session
assert session.LabSession().trace is not None
assert "labPicture" in server.page("")

sys.argv[1:] = []
runpy.run_module("torchzero_clip", run_name="__main__")
"""


def run(*command: object, cwd: Path) -> str:
    """The output of a command; if it fails, what it said and an end."""
    done = subprocess.run(
        [str(c) for c in command], check=False, capture_output=True, text=True, cwd=cwd
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))[:200]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def only(pattern: str) -> Path:
    found = sorted((ROOT / "dist").glob(pattern))
    if len(found) != 1:
        sys.exit(
            f"dist/ must hold one {pattern}, it holds {[f.name for f in found]}: run make dist"
        )
    return found[0]


def expect(what: str, found: set[str], wanted: set[str]) -> None:
    if found != wanted:
        sys.exit(f"{what}: lacks {sorted(wanted - found)}, has besides {sorted(found - wanted)}")


def check_contents(wheel: Path) -> None:
    """The wheel has every file of the package, what describes it, and nothing else."""
    kinds = (".py", ".h", ".html", ".js", ".css")
    files = [f for f in (ROOT / "torchzero_clip").rglob("*") if f.suffix in kinds]
    source = {str(f.relative_to(ROOT)) for f in files}
    results = ROOT / "benchmarks" / "results"
    runs = [f for name in ("traces", "troubles") for f in (results / name).iterdir()]
    source |= {f"torchzero_clip/study/lab/runs/{f.name}" for f in runs}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = archive.read(f"{about}/METADATA").decode()
    described = {f"{about}/{f}" for f in ("METADATA", "RECORD", "WHEEL", "licenses/LICENSE")}
    expect(wheel.name, names, source | described | {"torchzero_clip/py.typed"})
    init = (ROOT / "torchzero_clip" / "__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"$', init, re.M)
    if f"\nVersion: {version}\n" not in metadata or "\n# torchzero_clip\n" not in metadata:
        sys.exit(f"{wheel.name}: its metadata lack version {version} or the README:\n{metadata}")


def use(archive: Path, folder: Path) -> None:
    """Install an archive, alone, into a folder and use it from there."""
    target = folder / archive.suffix.strip(".")
    pip = [*PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(*pip, "--no-deps", "--no-build-isolation", "--target", target, archive, cwd=folder)
    if "ClipNorm" not in run(*PYTHON, "-W", "error", "-c", USE, target, cwd=folder):
        sys.exit(f"{archive.name}: python -m torchzero_clip does not list the rules")
    print(f"{archive.name}: installs, trains, resumes, attaches and describes itself")


def check_sdist(sdist: Path, folder: Path) -> None:
    """The source archive has what the README's commands need: the tests, the demo, the docs."""
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
        else:  # Python before 3.10.12
            archive.extractall(folder)
    tree = folder / sdist.name.removesuffix(".tar.gz")
    for name in ("README.md", "LICENSE", "Makefile", "constraints.txt", ".ci/run", "mkdocs.yml"):
        if (tree / name).read_bytes() != (ROOT / name).read_bytes():
            sys.exit(f"{sdist.name}: {name} is not the one here")
    run("make", "--dry-run", "test", "demo", cwd=tree)
    run(sys.executable, "examples/demo.py", "--steps", 3, cwd=tree)
    here, there = ({f.relative_to(t) for f in (t / "tests").rglob("*.py")} for t in (ROOT, tree))
    expect(f"the tests in {sdist.name}", set(map(str, there)), set(map(str, here)))
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    found = run(*pytest, "--collect-only", cwd=tree).count("::")
    print(f"{sdist.name}: its demo runs, and pytest finds {found} tests in it")


def main() -> None:
    wheel, sdist = only("*.whl"), only("*.tar.gz")
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as folder:
        use(wheel, Path(folder).resolve())
        use(sdist, Path(folder).resolve())
        check_sdist(sdist, Path(folder).resolve())


if __name__ == "__main__":
    main()
