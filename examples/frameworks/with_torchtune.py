"""torchtune: the recipe for full fine-tuning with a chain in the config, and a resumed run."""

import contextlib
import runpy
import sys
from pathlib import Path

import torch
import torchtune
from omegaconf import OmegaConf
from torchtune.config import instantiate

from torchzero_clip import LR, Adam, WeightDecay, ZClip, optimizer_class

Clipped = optimizer_class(ZClip(warmup_steps=4), Adam(), WeightDecay(0.0), LR(1e-3))

FILE = "model-00001-of-00001.bin"
torch.manual_seed(0)
tokens = torch.randint(64, (16, 8)).tolist()
sizes = {"vocab_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 32}
chain = {"optimizer": {"_component_": f"{__name__}.Clipped", "lr": 1e-2}, "optimizer_in_bwd": False}
tiny = {"_component_": "torchtune.models.llama2.llama2", "max_seq_len": 16, **sizes}
reader = {"_component_": "types.SimpleNamespace", "path": None, "pad_id": 0}
few = {"device": "cpu", "dtype": "fp32", "seed": 0, "epochs": 4, "batch_size": 4}
few |= {"enable_activation_checkpointing": False, "enable_activation_offloading": False}
own = "torchtune.training.FullModelTorchTuneCheckpointer"
files = {"_component_": own, "checkpoint_dir": "base", "checkpoint_files": [FILE]}
few |= {"model": tiny, "tokenizer": reader, "dataset": {"_component_": f"{__name__}.data"}}
recipes = f"{Path(torchtune.__file__).parents[1]}/recipes"
RECIPE = runpy.run_path(f"{recipes}/full_finetune_single_device.py")
defaults = OmegaConf.load(f"{recipes}/configs/llama2/7B_full_low_memory.yaml")
config = OmegaConf.merge(defaults, chain, few, {"checkpointer": files, "output_dir": "out"})


def data(tokenizer, packed):
    return [{"tokens": text, "labels": text} for text in tokens]


def train(config):
    recipe = RECIPE["FullFinetuneRecipeSingleDevice"](config)
    with contextlib.redirect_stdout(sys.stderr):
        recipe.setup(config)
        recipe.train()
    return recipe._model


Path("base").mkdir(exist_ok=True)
torch.save(instantiate(config.model).state_dict(), f"base/{FILE}")
run = train(config)
third = {"checkpointer": {"checkpoint_files": [f"epoch_2/{FILE}"]}, "resume_from_checkpoint": True}
resumed = train(OmegaConf.merge(config, third))
print(all(map(torch.equal, run.parameters(), resumed.parameters())))
# → True
