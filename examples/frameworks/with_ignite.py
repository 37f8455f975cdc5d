"""ignite: a trainer with AdamW and an attached rule, and its checkpoint."""

import torch
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver

from torchzero_clip import ZClip, attach

torch.manual_seed(0)
batches = [((1 + i % 3) * torch.randn(16, 4), torch.randn(16, 1)) for i in range(8)]


def start():
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attach(opt, ZClip(warmup_steps=4), in_checkpoint=True)
    trainer = create_supervised_trainer(model, opt, torch.nn.functional.mse_loss)
    return trainer, {"model": model, "opt": opt, "trainer": trainer}


trainer, parts = start()
saver = Checkpoint(parts, DiskSaver("checkpoints", require_empty=False), n_saved=1)
trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), saver)
trainer.run(batches, max_epochs=2)

resumed, others = start()
Checkpoint.load_objects(others, torch.load(saver.last_checkpoint, weights_only=True))
resumed.run(batches, max_epochs=2)
print(torch.equal(parts["model"].weight, others["model"].weight))
# → True
