"""A training that a signal ends behind a step, and that goes on from what lies in its folder.

`python killed.py FRAMEWORK STEP`: it ends behind that step, at 0 behind none, and prints a
digest of its weights.
"""

import hashlib
import math
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.frameworks import builders
from tests.helpers import ROOT


def script(name: str, end: str) -> Any:
    """The names that a script of the examples makes before it trains."""
    source = (ROOT / "examples" / "frameworks" / f"with_{name}.py").read_text()
    before, found, _ = source.partition(f"\n{end}")
    assert found, f"with_{name}.py has no line that begins with {end}"
    names: dict[str, Any] = vars(sys.modules["__main__"])  # torchtune looks them up there
    exec(before, names)
    return names


def fastai() -> nn.Module:
    names = script("fastai", "run, resumed =")
    learner = names["start"]()
    held = sorted(Path("models").glob("model_*.pth"))
    if held:
        learner.load(held[-1].stem)
    save = names["SaveModelCallback"](every_epoch=True, with_opt=True)
    names["train"](learner, cbs=save, start_epoch=len(held))
    return learner.model


def composer() -> nn.Module:
    often = {"save_folder": "held", "save_interval": "3ba", "run_name": "one", "autoresume": True}
    trainer = script("composer", "run =")["start"](**often)
    trainer.fit()
    return trainer.state.model


def sentence_transformers() -> nn.Module:
    trainer = script("sentence_transformers", "run, resumed =")["start"]()
    trainer.train(resume_from_checkpoint=any(Path("out").glob("checkpoint-*")))
    return trainer.model


def torchtune() -> nn.Module:
    names = script("torchtune", 'Path("base")')
    config, file = names["config"], names["FILE"]
    held = sorted(Path("out").glob(f"epoch_*/{file}"))
    if held:
        files = {"checkpoint_files": [str(held[-1].relative_to("out"))]}
        changes = {"checkpointer": files, "resume_from_checkpoint": True}
        return names["train"](names["OmegaConf"].merge(config, changes))
    Path("base").mkdir()
    model = names["instantiate"](config.model)
    torch.save(model.state_dict(), f"base/{file}")
    return names["train"](config)


def verl() -> nn.Module:
    ours = {"optimizer_impl": builders.__name__, "optimizer": "ZClippedAdamW"}
    return builders.train(builders.Verl(math.inf, **ours), Path("held"))


def nemo_automodel() -> nn.Module:
    target = f"{builders.__name__}.with_state"
    return builders.train(builders.Automodel(math.inf, _target_=target), Path("held"))


def kill(step: int, seen: list[int], *_: Any) -> None:
    seen.append(1)
    if len(seen) == step:
        os.kill(os.getpid(), signal.SIGKILL)


TRAININGS = {
    f.__name__: f
    for f in (fastai, composer, sentence_transformers, torchtune, verl, nemo_automodel)
}

if __name__ == "__main__":
    register_optimizer_step_post_hook(partial(kill, int(sys.argv[2]), []))
    model = TRAININGS[sys.argv[1]]()
    whole = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("→", hashlib.sha256(whole).hexdigest())
