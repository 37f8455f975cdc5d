"""The Trainer of transformers drives a chain as it drives torch's optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.frameworks.common import CHAINS, FREE, averaged, blank, need, values
from tests.helpers import equal
from torchzero_clip import LR, Adam, ClipNorm, Modular, Transform, WeightDecay, ZClip, to_floats

transformers = need("transformers")
need("accelerate")  # the Trainer is built on it
pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # its own deprecations, and advice on the hardware
]
STEPS = 8


def gpt(dropout: float = 0.1) -> Any:
    """A model of two layers; its dropout makes a resumed run depend on the random state too."""
    transformers.set_seed(1)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = transformers.GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def texts() -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(2)
    ids = torch.randint(64, (4 * STEPS, 16), generator=rng)
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(folder: Path, model: Any, cls: Any = transformers.Trainer, **kwargs: Any) -> Any:
    """A Trainer whose own clipping is off unless the arguments say otherwise."""
    given = "optimizers", "optimizer_cls_and_kwargs", "eval_dataset"
    passed = {k: kwargs.pop(k) for k in given if k in kwargs}
    settings = {"max_grad_norm": 0.0, "max_steps": STEPS, "save_strategy": "no", **kwargs}
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        seed=3,
        **settings,
    )
    return cls(model=model, args=args, train_dataset=texts(), **passed)


def pair(model: Any, links: list[Transform]) -> tuple[Any, Any]:
    """What `optimizers=` takes."""
    opt = Modular(model.named_parameters(), *links)
    return opt, torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.02, total_steps=2 * STEPS)


class Logging(transformers.Trainer):
    """The Trainer with the metrics of the chain in its log."""

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:  # a line of training; those of evaluation have other keys
            logs |= to_floats(self.optimizer.optimizer.metrics())
        super().log(logs, *args, **kwargs)


def logged(run: Any, name: str) -> list[float]:
    return [line[name] for line in run.state.log_history if "loss" in line]


@pytest.mark.parametrize("chain", CHAINS)
def test_it_trains_as_a_loop_by_hand_does(chain, tmp_path):
    model, other = gpt(dropout=0.0), gpt(dropout=0.0)
    batches: list[dict[str, Tensor]] = []
    seen = model.register_forward_pre_hook(
        lambda _, args, kwargs: batches.append(dict(kwargs)), with_kwargs=True
    )
    trainer(tmp_path, model, optimizers=pair(model, CHAINS[chain]())).train()
    seen.remove()
    opt, scheduler = pair(other, CHAINS[chain]())
    for batch in batches:
        opt.zero_grad()
        other(**batch).loss.backward()
        opt.step()
        scheduler.step()
    assert len(batches) == STEPS
    assert equal(values(model), values(other))


@pytest.mark.parametrize("how", ["optimizers", "class"])
@pytest.mark.parametrize("chain", CHAINS)
def test_a_resumed_run_is_the_run_without_a_break(chain, how, tmp_path):
    class Ours(Modular):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, *CHAINS[chain]()[:-1], LR(lr))

    def start(folder: Path, **kwargs: Any) -> Any:
        model = gpt()
        made: dict[str, Any] = {
            "optimizers": {"optimizers": pair(model, CHAINS[chain]())},
            "class": {"optimizer_cls_and_kwargs": (Ours, {"lr": 1e-2})},
        }[how]
        return trainer(folder, model, **made, **kwargs)

    straight = start(tmp_path / "straight", save_strategy="steps", save_steps=STEPS // 2)
    straight.train()
    resumed = start(tmp_path / "resumed")
    blank(resumed.model)
    half = tmp_path / "straight" / f"checkpoint-{STEPS // 2}"
    resumed.train(resume_from_checkpoint=str(half))
    assert equal(values(straight.model), values(resumed.model))


def test_the_groups_of_the_trainer_set_the_weight_decay(tmp_path):
    """It gives two groups, one of which does not decay."""

    class Decayed(Modular):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, Adam(), WeightDecay(0.0), LR(lr))

    made = {"optimizer_cls_and_kwargs": (Decayed, {"lr": 1e-2})}
    run = trainer(tmp_path, gpt(), weight_decay=0.1, **made)
    run.train()
    decays = [group["weight_decay"] for group in run.optimizer.param_groups]
    assert decays == [0.1, 0.0]


def test_a_weight_decay_that_no_link_reads_is_an_error(tmp_path):
    class Plain(Modular):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, Adam(), LR(lr))

    made = {"optimizer_cls_and_kwargs": (Plain, {"lr": 1e-2})}
    with pytest.raises(ValueError, match="no transform uses it: add WeightDecay"):
        trainer(tmp_path, gpt(), weight_decay=0.1, **made).train()
    trainer(tmp_path, gpt(), **made).train()  # its default, 0, asks for nothing


def test_the_log_of_the_trainer_has_the_metrics_of_the_chain(tmp_path):
    model = gpt()
    links = [ClipNorm(0.5, dim="global"), Adam(), LR(1e-2)]
    run = trainer(tmp_path, model, Logging, optimizers=pair(model, links))
    run.train()
    assert logged(run, "ClipNorm/norm") == pytest.approx(logged(run, "grad_norm"), rel=1e-5)
    assert logged(run, "ClipNorm/clipped") == [n > 0.5 for n in logged(run, "grad_norm")]


def test_the_clipping_of_the_trainer_hides_the_norms_from_a_chain_that_learns_them(tmp_path):
    """Why the page says max_grad_norm=0; the Trainer's default is 1."""

    def norms(**kwargs: Any) -> list[float]:
        model = gpt()
        links = [ZClip(max_norm=None), Adam(), LR(1e-3)]
        run = trainer(tmp_path, model, Logging, optimizers=pair(model, links), **kwargs)
        run.train()
        return logged(run, "ZClip/norm")

    free, pinned = norms(), norms(max_grad_norm=0.3)
    assert min(free) > 0.3
    assert pinned == pytest.approx([0.3] * STEPS, rel=1e-4)


def test_accumulated_batches_are_one_step(tmp_path):
    model = gpt()
    opt, scheduler = pair(model, CHAINS["adaptive"]())
    run = trainer(
        tmp_path,
        model,
        optimizers=(opt, scheduler),
        max_steps=2,
        gradient_accumulation_steps=4,
    )
    run.train()
    assert {int(state["Adam/step"]) for state in opt.state.values()} == {2}


def test_guard_skips_a_step_of_the_trainer(tmp_path):
    """Its own reading of the norm spreads an infinity over all gradients; the step is skipped."""

    class Broken(Logging):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            out = super().compute_loss(*args, **kwargs)
            return out * (torch.inf if self.state.global_step == 2 else 1)

    model = gpt()
    run = trainer(tmp_path, model, Broken, optimizers=pair(model, CHAINS["adaptive"]()))
    run.train()
    assert logged(run, "Guard/skipped") == [0, 0, 1, 1, 1, 1, 1, 1]
    assert all(p.isfinite().all() for p in model.parameters())


class Watched(transformers.Trainer):
    """The Trainer, which notes the weights of its evaluations and those that were to be there."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        out = super().evaluate(*args, **kwargs)
        opt, self.shown = self.optimizer.optimizer, values(self.model)
        opt.train()
        self.training, self.wanted = values(self.model), averaged(opt, self.model)
        opt.eval()
        return out


def test_evaluations_and_what_is_saved_after_them_have_averaged_weights(tmp_path):
    def start(folder: Path) -> Any:
        model = gpt()
        half = {"eval_steps": STEPS // 2, "save_steps": STEPS // 2}
        when = {"eval_strategy": "steps", "save_strategy": "steps", **half}
        pairs = {"optimizers": pair(model, FREE["free"]())}
        return trainer(folder, model, Watched, eval_dataset=texts()[:8], **pairs, **when)

    straight, resumed = start(tmp_path / "straight"), start(tmp_path / "resumed")
    straight.train()
    assert equal(straight.shown, straight.wanted)
    assert not equal(straight.shown, straight.training)
    last = str(tmp_path / "straight" / f"checkpoint-{STEPS}")
    kept = transformers.GPT2LMHeadModel.from_pretrained(last)
    assert equal(values(kept), straight.wanted)
    blank(resumed.model)
    resumed.train(resume_from_checkpoint=last.replace(str(STEPS), str(STEPS // 2)))
    assert equal(resumed.training, straight.training)
    assert equal(resumed.shown, straight.shown)
