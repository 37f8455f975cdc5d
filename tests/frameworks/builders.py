"""Trainings whose optimizer verl and Automodel build, each from a configuration of its own.

What is done of a step is done by their own functions: the optimizer, the schedule, the clipping and
the checkpoint. The model is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from torchzero_clip import LR, Adam, ClipNorm, Guard, Modular, WeightDecay, ZClip, optimizer_class
from torchzero_clip.core.sharding.layout import full

ClippedAdamW = optimizer_class(
    ClipNorm(1.0, dim="global"), Adam(), WeightDecay(0.0), LR(1e-3), name="ClippedAdamW"
)
ZClippedAdamW = optimizer_class(
    Guard(), ZClip(warmup_steps=5), Adam(), WeightDecay(0.0), LR(1e-3), name="ZClippedAdamW"
)
NoDecayAdam = optimizer_class(Adam(), LR(1e-3), name="NoDecayAdam")
STEPS, OFTEN = 50, 10


def with_state(params: Any, **values: Any) -> Modular:
    """A chain that has its state before anybody asks for it."""
    opt = ZClippedAdamW(params, **values)
    opt.init_state()
    return opt


def batches() -> Iterator[Tensor]:
    rng = torch.Generator().manual_seed(3)
    yield from torch.randint(16, (STEPS, 4, 8), generator=rng)


def language_model() -> Any:
    """A small Llama, the same every time, with a layer that gets no gradient, as an expert may."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 16}
    torch.manual_seed(1)
    config = LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    model.spare = nn.Linear(2, 2)
    return model


class Verl:
    """FSDP2 on one process."""

    def __init__(self, limit: float, **config: Any) -> None:
        from verl.utils import fsdp_utils
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
        from verl.workers.config import FSDPOptimizerConfig
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

        fsdp_utils.get_device_id = lambda: "cpu"  # it would ask for an accelerator
        self.engine, self.model, self.norms = FSDPEngine, language_model(), []
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        fully_shard(self.model, mesh=dist.init_device_mesh("cpu", (1,)))
        optim = FSDPOptimizerConfig(
            **config,
            clip_grad=limit,
            lr=1e-2,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            total_training_steps=STEPS,
            lr_warmup_steps=5,
            lr_scheduler_type="cosine",
            min_lr_ratio=0.1,
        )
        state = {"module": self.model, "optimizer_config": optim, "rank": 0}
        self.run = SimpleNamespace(**state, scaler=None, _qat_enabled=False)
        self.opt = self.run.optimizer = FSDPEngine._build_optimizer(self.run, self.model)
        self.run.lr_scheduler = FSDPEngine._build_lr_scheduler(self.run, self.opt)
        self.files = FSDPCheckpointManager(self.model, self.opt, self.run.lr_scheduler)

    def step(self) -> None:
        self.norms.append(self.engine.optimizer_step(self.run))
        self.engine.optimizer_zero_grad(self.run)
        self.engine.lr_scheduler_step(self.run)

    def save(self, folder: Path) -> None:
        self.files.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        self.files.load_checkpoint(str(folder))


class Automodel:
    """A recipe's configuration, read by Automodel's own reader of files."""

    def __init__(self, limit: float, **config: Any) -> None:
        import yaml
        from nemo_automodel.components.checkpoint.config import CheckpointingConfig
        from nemo_automodel.components.config.loader import ConfigNode
        from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm
        from nemo_automodel.recipes._typed_config import RecipeConfig

        values = {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, **config}
        sections = {
            "optimizer": values,
            "clip_grad_norm": {"max_norm": limit},
            "lr_scheduler": {"lr_decay_style": "cosine", "lr_warmup_steps": 5, "min_lr": 1e-3},
            "step_scheduler": {"global_batch_size": 4, "max_steps": STEPS, "num_epochs": 1},
        }
        cfg: Any = RecipeConfig(ConfigNode(yaml.safe_load(yaml.safe_dump(sections))))
        self.model, self.norms = language_model(), []
        (self.opt,) = cfg.optimizer.build(self.model)
        steps = cfg.step_scheduler.build(list(batches()), 1, 4)
        self.schedulers = cfg.lr_scheduler.build([self.opt], steps)
        self.clip, self.max_norm = scale_grads_and_clip_grad_norm, cfg.clip_grad_norm.max_norm
        plain = {"model_save_format": "torch_save", "save_consolidated": False}
        self.files = CheckpointingConfig(**plain).build(0, 0, 0)

    def step(self) -> None:
        self.norms.append(float(self.clip(self.max_norm, [self.model])))
        self.opt.step()
        self.opt.zero_grad()
        for scheduler in self.schedulers:
            scheduler.step(1)

    def save(self, folder: Path) -> None:
        self.files.save_model(self.model, str(folder))
        self.files.save_optimizer(self.opt, self.model, str(folder), self.schedulers)

    def load(self, folder: Path) -> None:
        self.files.load_model(self.model, str(folder / "model"))
        self.files.load_optimizer(self.opt, self.model, str(folder), self.schedulers)


def train(run: Verl | Automodel, folder: Path | None = None) -> nn.Module:
    """Go to the last step from the last checkpoint in a folder, and save others there."""
    done = 0
    if folder and (held := sorted(folder.glob("step_*"))):
        run.load(held[-1])
        done = int(held[-1].name.removeprefix("step_"))
    for i, ids in enumerate(batches(), 1):
        if i > done:
            run.model(input_ids=ids, labels=ids).loss.backward()
            run.step()
            if folder and i % OFTEN == 0:
                run.save(folder / f"step_{i}")
    return nn.ParameterList([full(p.detach()) for p in run.model.parameters()])
