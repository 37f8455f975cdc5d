"""A run whose process is killed again and again, with the recipe of docs/checkpoints.md.

test_faults.py starts this as a process of its own. It imports torch once, computes nothing before
the end, and forks a child for each life of the run.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch._dynamo  # what the first step of an optimizer would import, in every child

from torchzero_clip import LR, Adam, ClipNormGrowth, Modular, ScheduleFree, WeightEMA, ZClip

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def recipe() -> dict[str, Any]:
    """The functions on the page, from its text."""
    (code,) = re.findall(
        r"^```python\n((?:(?!^```).)*?^def save\(.*?)^```", PAGE.read_text(), re.M | re.S
    )
    functions: dict[str, Any] = {"torch": torch}
    exec(compile(code, str(PAGE), "exec"), functions)
    return functions


def train(folder: Path, steps: int, tell: Callable[[str], None]) -> None:
    """Go on from the newest checkpoint; says what it does: "t"rain, evaluate with "a"veraged
    weights, "s"ave these or those of training, "e"nd.
    """
    save, newest = (recipe()[name] for name in ("save", "newest"))
    for path in folder.glob("*.pt"):
        torch.load(path, weights_only=True)  # raises if one of them is not whole
    torch.manual_seed(0)
    linear = torch.nn.Linear
    model = torch.nn.Sequential(linear(32, 256), torch.nn.Tanh(), linear(256, 32))
    links = (
        ZClip(warmup_steps=5),
        Adam(),
        ClipNormGrowth(),
        LR(1e-2),
        ScheduleFree(),
        WeightEMA(0.9),
    )
    opt = Modular(model.parameters(), *links)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=steps)
    parts = {"model": model, "opt": opt, "scheduler": scheduler}
    held = newest(folder)
    for name in parts if held else ():
        parts[name].load_state_dict(held[name])
    opt.train()  # every other checkpoint is of an evaluation
    for step in range(held["step"] if held else 0, steps):
        tell("t")
        torch.manual_seed(step)
        opt.zero_grad()
        model(torch.randn(8, 32)).square().mean().backward()
        opt.step()
        scheduler.step()
        tell("a")
        for name in ("ScheduleFree", "WeightEMA"):
            with opt.averaged(name), torch.no_grad():
                model(torch.randn(8, 32))
        if step % 2:
            opt.eval()
        tell("s")
        state = {name: part.state_dict() for name, part in parts.items()}
        save({"step": step + 1, **state}, folder, step + 1)
        opt.train()
    tell("e")


def fork(work: Callable[[], None]) -> int:
    """A child that does this and nothing else."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def finished(pid: int) -> bool:
    """Whether a child came to its end, not to that of a SIGKILL. Any other end raises."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status not in (0, -signal.SIGKILL):
        raise RuntimeError(f"a child ended with {status}")
    return status == 0


def one_life(folder: Path, steps: int, when: tuple[str, int, float] | None) -> tuple[str, bool]:
    """What the run did last, and whether it came to its end.

    It is killed some seconds after it has said something so many times, or never.
    """
    ears, mouth = os.pipe()
    pid = fork(lambda: train(folder, steps, lambda word: os.write(mouth, word.encode())))
    os.close(mouth)
    heard = ""
    if when is not None:
        word, times, seconds = when
        while heard.count(word) < times and (new := os.read(ears, 1)):
            heard += new.decode()
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    while new := os.read(ears, 4096):
        heard += new.decode()
    os.close(ears)
    return heard[-1:], finished(pid)


def moment(kill: int, chance: random.Random) -> tuple[str, int, float]:
    """When to strike: while it loads, while it trains, while it saves."""
    word = "ttaasss"[kill % 7]
    times = 0 if kill % 10 == 0 else chance.randint(1, 3)
    return word, times, chance.uniform(0, 0.02 if times == 0 else 0.004)


def lines_of_a_save(folder: Path) -> tuple[int, int]:
    """Kill a save at every line it runs; raises unless there is a whole checkpoint after each.

    The number of lines, and after how many of these kills a file was left that is not the newest
    checkpoint yet.
    """
    save, newest = (recipe()[name] for name in ("save", "newest"))
    names = {save.__code__}

    def die_at(line: int, at: Path) -> None:
        ran = 0

        def watch(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal ran
            if frame.f_code not in names:
                return None
            ran += event == "line"
            if ran == line:
                os.kill(os.getpid(), signal.SIGKILL)
            return watch

        for step in (1, 2, 3):
            sys.settrace(watch if step == 3 else None)
            save({"value": torch.full((1000,), float(step))}, at, step)

    parts = 0
    for line in range(1, 100):
        at = folder / str(line)
        at.mkdir()
        end = finished(fork(lambda: die_at(line, at)))  # noqa: B023
        value = newest(at)["value"]
        known = [torch.full((1000,), float(step)) for step in ([3] if end else [2, 3])]
        if not any(torch.equal(value, one) for one in known):
            raise RuntimeError(f"a save killed at its line {line} left {value}")
        if end:
            return line - 1, parts
        parts += bool(list(at.glob("*.part")))
    raise RuntimeError("a save never ends")


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def main(root: Path, kills: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    chance, steps = random.Random(seed), 3 * kills
    broken, straight = root / "broken", root / "straight"
    broken.mkdir(), straight.mkdir()
    during = {"": 0, "t": 0, "a": 0, "s": 0}
    halves = 0
    for kill in range(kills):
        last, ended = one_life(broken, steps, moment(kill, chance))
        if ended:
            raise RuntimeError(f"the run was over after {kill} kills: it needs more steps")
        during[last] += 1
        halves += bool(list(broken.glob("*.part")))
    if not (one_life(broken, steps, None)[1] and one_life(straight, steps, None)[1]):
        raise RuntimeError("a run was killed that was left alone")
    (root / "lines").mkdir()
    lines, parts = lines_of_a_save(root / "lines")
    ends = [recipe()["newest"](folder) for folder in (broken, straight)]
    return {
        "during": {
            "load": during[""],
            "train": during["t"],
            "evaluation": during["a"],
            "save": during["s"],
        },
        "half files": halves,
        "files": sorted(path.name for path in broken.iterdir()),
        "equal": same(*ends) and ends[0]["step"] == steps,
        "lines": lines,
        "lines with a half file": parts,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
