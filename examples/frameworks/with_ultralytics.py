"""ultralytics: AdamW with an attached rule, stopped after an epoch and resumed."""

import contextlib
from pathlib import Path

import numpy as np
import yaml
from PIL import Image
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils import LOGGER

from torchzero_clip import ZClip, attach


class Trainer(DetectionTrainer):
    def build_optimizer(self, *args, **kwargs):
        optimizer = super().build_optimizer(*args, **kwargs)
        self.handle = attach(optimizer, ZClip(warmup_steps=2), in_checkpoint=True)
        return optimizer

    def optimizer_step(self):  # as theirs, without their clip to 10
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.ema.update(self.model)


def cut_off(trainer):
    raise SystemExit


LOGGER.setLevel("ERROR")
for folder in ("data/images", "data/labels"):
    Path(folder).mkdir(parents=True, exist_ok=True)
for i, pixels in enumerate(np.random.default_rng(0).integers(255, size=(8, 32, 32, 3))):
    Image.fromarray(pixels.astype(np.uint8)).save(f"data/images/{i}.png")
    Path(f"data/labels/{i}.txt").write_text("0 0.5 0.5 0.4 0.4")
kinds = {"train": "images", "val": "images", "names": {0: "square"}}
Path("data.yaml").write_text(yaml.safe_dump({"path": str(Path("data").absolute()), **kinds}))
few = {"model": "yolo11n.yaml", "data": "data.yaml", "imgsz": 32, "epochs": 3, "batch": 4, "nbs": 4}
few |= {"optimizer": "AdamW", "device": "cpu", "workers": 0, "amp": False, "plots": False}

run = Trainer(overrides=few)
run.add_callback("on_model_save", cut_off)
with contextlib.suppress(SystemExit):
    run.train()
resumed = Trainer(overrides={**few, "resume": str(run.last)})
resumed.train()
print([int(part.handle.param_groups[0]["chain"]["ZClip/count"]) for part in (run, resumed)])
# → [2, 6]
