"""A run that goes back, whose process is killed again and again; test_recovered.py starts it.

It goes on from its newest checkpoint on disk, and a snapshot in memory dies with the process.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what the first step of an optimizer would import, in every child

from tests.processes.kills import finished, fork, recipe
from tests.recovering.runs import Loader, Run, batches, differences

EVERY, SAVED = 10, 3  # the steps from one snapshot to the next, and from one checkpoint
STEPS = 12  # the most steps of a life that is killed


def train(folder: Path, count: int, tell: Callable[[str], None]) -> None:
    """Go on from the newest checkpoint; says what it does: a s"t"ep, a way "b"ack, a "s"ave."""
    save, newest = (recipe()[name] for name in ("save", "newest"))
    bad = [i for i in range(count) if i % 60 > 40 and i % 7 < 5 and i % 60 < 52]
    run, loader = Run("adamw"), Loader(batches(count, bad=bad))
    recover = run.recover(loader, every=EVERY, check=5, window=10)
    parts = {"model": run.model, "opt": run.opt, "schedule": run.schedules[0]}
    parts |= {"loader": loader, "recover": recover}
    if (checkpoint := newest(folder)) is not None:
        torch.set_rng_state(checkpoint["torch"])
        state: Any = checkpoint["python"]
        random.setstate((state[0], tuple(state[1]), state[2]))
        for name, part in parts.items():  # recover last
            part.load_state_dict(checkpoint[name])
    for batch in recover.batches(loader):
        tell("t")
        run.train([batch])
        back, step = recover.step(run.losses[-1]), recover.now.count
        tell("b" if back else "")
        if step % SAVED == 0:  # mostly between two snapshots, and while the run is failing
            tell("s")
            python = random.getstate()
            state = {name: part.state_dict() for name, part in parts.items()}
            state |= {"python": [python[0], list(python[1]), python[2]]}
            save({**state, "torch": torch.get_rng_state()}, folder, step)
    state = {name: part.state_dict() for name, part in parts.items()}
    save({**state, "backs": len(recover.events)}, folder, 10**7)


def one_life(folder: Path, count: int, times: int | None, seconds: float) -> tuple[str, bool]:
    """What the run said, and whether it came to its end; killed behind so many steps, or never."""
    ears, mouth = os.pipe()

    def tell(word: str) -> None:
        os.write(mouth, word.encode())

    def live() -> None:
        warnings.simplefilter("ignore")
        train(folder, count, tell)

    pid = fork(live)
    os.close(mouth)
    heard = ""
    if times is not None:
        while heard.count("t") < times and (new := os.read(ears, 1)):
            heard += new.decode()
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    while new := os.read(ears, 4096):
        heard += new.decode()
    os.close(ears)
    return heard, finished(pid)


def main(root: Path, kills: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    chance, count = random.Random(seed), (STEPS + 6) * kills + 60
    broken, straight = root / "broken", root / "straight"
    broken.mkdir(), straight.mkdir()
    lives = []
    for _ in range(kills):
        heard, ended = one_life(broken, count, chance.randint(0, STEPS), chance.uniform(0, 0.004))
        if ended:
            raise RuntimeError(f"the run was over after {len(lives)} kills: it needs more batches")
        lives.append(heard)
    if not (one_life(broken, count, None, 0)[1] and one_life(straight, count, None, 0)[1]):
        raise RuntimeError("a run was killed that was left alone")
    ends = [recipe()["newest"](folder) for folder in (broken, straight)]
    backs = [end.pop("backs") for end in ends]
    return {
        "kills": len(lives),
        "lives that went back": sum(["b" in heard for heard in lives]),
        "backs": backs[1],
        "equal": not differences(*ends),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
