"""composer: a chain in its Trainer, and a run that resumes in the middle of an epoch."""

import torch
from composer import Trainer
from composer.models import ComposerModel
from torch.utils.data import DataLoader

from torchzero_clip import LR, Adam, Modular, WeightDecay, ZClip

torch.manual_seed(0)
pairs = [((1 + i % 3) * torch.randn(4), torch.randn(1)) for i in range(64)]


class Net(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, batch):
        return self.layer(batch[0])

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch[1])


def start(**kwargs):
    torch.manual_seed(1)
    net, loader = Net(), DataLoader(pairs, batch_size=16)
    opt = Modular(net.parameters(), ZClip(warmup_steps=4), Adam(), WeightDecay(0.01), LR(1e-2))
    few = {"max_duration": "4ep", "device": "cpu", "seed": 1, "progress_bar": False}
    return Trainer(model=net, optimizers=opt, train_dataloader=loader, **few, **kwargs)


run = start(save_folder="checkpoints", save_interval="3ba", save_overwrite=True)
run.fit()
resumed = start(load_path="checkpoints/ep1-ba6-rank0.pt")
resumed.fit()
print(torch.equal(run.state.model.layer.weight, resumed.state.model.layer.weight))
# → True
