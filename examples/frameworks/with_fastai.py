"""fastai: a chain with the one-cycle schedule, and a run that resumes from a saved epoch."""

from functools import partial

import torch
from fastai.callback.schedule import Learner  # with its fit_one_cycle
from fastai.callback.tracker import SaveModelCallback
from fastai.learner import DataLoader, DataLoaders, OptimWrapper

from torchzero_clip import LR, Adam, WeightDecay, ZClip, optimizer_class

Clipped = optimizer_class(ZClip(warmup_steps=4), Adam(), WeightDecay(0.01), LR(1e-3))

torch.manual_seed(0)
pairs = [((1 + i % 3) * torch.randn(4), torch.randn(1)) for i in range(64)]


def start():
    torch.manual_seed(1)
    loaders = DataLoaders(DataLoader(pairs, bs=16), DataLoader(pairs, bs=16))
    loss, opt_func = torch.nn.functional.mse_loss, partial(OptimWrapper, opt=Clipped)
    return Learner(loaders, torch.nn.Linear(4, 1), loss_func=loss, opt_func=opt_func)


def train(learner, **kwargs):
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(4, 1e-2, **kwargs)


run, resumed = start(), start()
train(run, cbs=SaveModelCallback(every_epoch=True, with_opt=True))
resumed.load("model_1")
print(int(resumed.opt.param_groups[0]["chain"]["ZClip/count"]))
# → 8

train(resumed, start_epoch=2)
print(torch.equal(run.model.weight, resumed.model.weight))
# → True
