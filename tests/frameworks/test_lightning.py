"""Lightning drives a chain as it drives torch's optimizers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.frameworks.common import CHAINS, FREE, averaged, blank, data, need, network, values
from tests.helpers import equal
from torchzero_clip import (
    LR,
    Adam,
    AutoClip,
    ClipNorm,
    Clipper,
    Guard,
    Modular,
    ZClip,
    to_floats,
)

lightning = need("lightning")
pytestmark = [
    pytest.mark.frameworks,
    # it advises on workers and loggers, and warns of its own use of torch
    pytest.mark.filterwarnings("ignore"),
]
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Lit(lightning.LightningModule):
    """A regression under any chain."""

    def __init__(self, links: list[Any], scheduled: bool = False) -> None:
        super().__init__()
        self.net, self.links, self.scheduled = network(), links, scheduled
        self.norms: list[float] = []

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        opt = Modular(self.named_parameters(), *self.links)
        if not self.scheduled:
            return opt
        cycle = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.05, total_steps=16)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


class Manual(Lit):
    """The same by hand."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor]) -> None:
        opt, scheduler = self.optimizers(), self.lr_schedulers()
        opt.zero_grad()
        self.manual_backward(self.loss(batch))
        opt.step()
        if scheduler is not None:
            scheduler.step()


def fit(model: Any, folder: Path, epochs: int = 2, resume: Any = None, **kwargs: Any) -> Any:
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=kwargs.pop("logger", False),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **kwargs,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data(), batch_size=None), ckpt_path=resume)
    return trainer


def by_hand(
    links: list[Any], epochs: int = 2, scheduled: bool = False, clip: float | None = None
) -> dict[str, Tensor]:
    """The loop that Lightning stands for."""
    net = network()
    opt = Modular(net.named_parameters(), *links)
    total = 16 if scheduled else 0
    cycle = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, total) if scheduled else None
    for _ in range(epochs):
        for x, y in data():
            opt.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            opt.step()
            if cycle is not None:
                cycle.step()
    return values(net)


@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "OneCycleLR"])
@pytest.mark.parametrize("kind", [Lit, Manual])
@pytest.mark.parametrize("chain", CHAINS)
def test_it_trains_as_a_loop_by_hand_does(chain, kind, scheduled, tmp_path):
    model = kind(CHAINS[chain](), scheduled)
    fit(model, tmp_path)
    assert equal(values(model.net), by_hand(CHAINS[chain](), scheduled=scheduled))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", [Lit, Manual])
@pytest.mark.parametrize("chain", CHAINS)
def test_a_resumed_run_is_the_run_without_a_break(chain, kind, precision, tmp_path):
    straight = kind(CHAINS[chain](), scheduled=True)
    fit(straight, tmp_path, epochs=2, precision=precision)

    first = kind(CHAINS[chain](), scheduled=True)
    fit(first, tmp_path, epochs=1, precision=precision).save_checkpoint(tmp_path / "one.ckpt")
    second = blank(kind(CHAINS[chain](), scheduled=True))
    fit(second, tmp_path, epochs=2, precision=precision, resume=tmp_path / "one.ckpt")
    assert equal(values(straight.net), values(second.net))


class Half(Lit):
    """A model in bfloat16, with rounding="exact"."""

    def configure_optimizers(self) -> Any:
        return Modular(self.named_parameters(), *self.links, rounding="exact")


def test_bf16_true_with_exact_rounding_resumes_to_the_same_float32_weights(tmp_path):
    """Lightning loads the model first and the optimizer second."""

    def run(epochs: int, resume: Path | None = None) -> tuple[Any, dict[str, Tensor]]:
        model = Half(CHAINS["adaptive"]())
        if resume is not None:
            blank(model)
        trainer = fit(model, tmp_path, epochs, resume, precision="bf16-true")
        (opt,) = trainer.optimizers
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        return trainer, opt.exact_state_dict(model)

    _, straight = run(2)
    first, _ = run(1)
    first.save_checkpoint(tmp_path / "one.ckpt")
    _, resumed = run(2, tmp_path / "one.ckpt")
    assert equal(straight, resumed)


def test_a_skipped_step_counts_for_lightning_unless_the_hook_holds_the_scheduler(tmp_path):
    class Guarded(Lit):
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            bad = self.global_step == 3
            return super().loss(batch) * (float("nan") if bad else 1.0)

    class Held(Guarded):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            if not self.optimizers().skipped():
                scheduler.step()

    counts = []
    for kind in (Guarded, Held):
        trainer = fit(kind([Guard(), Adam(), LR(1e-2)], scheduled=True), tmp_path, epochs=1)
        (config,) = trainer.lr_scheduler_configs
        counts.append(config.scheduler.last_epoch)
        assert trainer.global_step == 8
        assert to_floats(trainer.optimizers[0].metrics())["Guard/skipped"] == 1
    assert counts == [8, 7]


def test_bf16_mixed_keeps_parameters_and_state_in_float32(tmp_path):
    model = Lit(CHAINS["adaptive"]())
    (opt,) = fit(model, tmp_path, precision="bf16-mixed").optimizers
    assert not equal(values(model.net), by_hand(CHAINS["adaptive"]()))  # autocast was on
    held = [v for state in opt.state.values() for v in state.values()]
    assert {v.dtype for v in (*held, *model.parameters())} == {torch.float32}


def test_gradient_clip_val_comes_before_the_chain(tmp_path):
    model = Lit(CHAINS["clip"]())
    fit(model, tmp_path, gradient_clip_val=0.1)
    expected = by_hand(CHAINS["clip"](), clip=0.1)
    assert equal(values(model.net), expected)
    assert not equal(expected, by_hand(CHAINS["clip"]()))


def test_gradient_clip_val_hides_the_norms_from_a_chain_that_learns_them(tmp_path):
    """Why the page says to leave it unset."""

    class Watched(Lit):
        def on_train_batch_end(self, *_: Any) -> None:
            self.norms.append(self.optimizers().metrics()["ZClip/norm"].item())

    free, pinned = Watched([ZClip(), Adam(), LR(1e-2)]), Watched([ZClip(), Adam(), LR(1e-2)])
    fit(free, tmp_path)
    fit(pinned, tmp_path, gradient_clip_val=0.1)
    assert min(free.norms) > 0.1
    assert pinned.norms == pytest.approx([0.1] * 16, rel=1e-4)


def test_accumulated_batches_are_one_step(tmp_path):
    model = Lit(CHAINS["adaptive"]())
    (opt,) = fit(model, tmp_path, accumulate_grad_batches=4).optimizers
    steps = {int(state["Adam/step"]) for state in opt.state.values()}
    assert steps == {4}  # 16 batches


def test_metrics_are_those_of_the_step_before(tmp_path):
    """`self.optimizers()` is a wrapper; it must not serve a copy that grew old."""

    class Logged(Lit):
        def on_train_batch_end(self, *_: Any) -> None:
            wrapped, bare = self.optimizers(), self.optimizers(use_pl_optimizer=False)
            assert wrapped is not bare
            assert to_floats(wrapped.metrics()) == to_floats(bare.metrics())
            self.norms.append(to_floats(wrapped.metrics())["ClipNorm/norm"])

    model = Logged(CHAINS["clip"]())
    fit(model, tmp_path)
    assert len(set(model.norms)) == 16


class Hooked(lightning.LightningModule):
    """The recipe for those who keep their optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.clipper = Clipper(self.parameters(), AutoClip("percentile", 50.0, warmup_steps=2))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.log("grad_norm", self.clipper.step())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["clipper"] = self.clipper.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.clipper.load_state_dict(checkpoint["clipper"])


def test_a_clipper_in_configure_gradient_clipping_acts_on_every_step(tmp_path):
    model = Hooked()
    fit(model, tmp_path)
    net = network()
    clipper = Clipper(net.parameters(), AutoClip("percentile", 50.0, warmup_steps=2))
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(2):
        for x, y in data():
            opt.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            clipper.step()
            opt.step()
    assert equal(values(model.net), values(net))
    norms = [c.param_groups[0]["chain"]["AutoClip/norms"] for c in (model.clipper, clipper)]
    torch.testing.assert_close(*norms, rtol=0, atol=0, equal_nan=True)


def test_a_clipper_in_configure_gradient_clipping_resumes(tmp_path):
    straight, first, second = Hooked(), Hooked(), blank(Hooked())
    fit(straight, tmp_path, epochs=2)
    fit(first, tmp_path, epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    fit(second, tmp_path, epochs=2, resume=tmp_path / "one.ckpt")
    assert equal(values(straight.net), values(second.net))


def test_two_optimizers_by_hand(tmp_path):
    """One chain for each half of the model, toggled as in a GAN."""

    class Two(Manual):
        def configure_optimizers(self) -> Any:
            head = Modular(self.net[2].parameters(), ClipNorm(0.1, dim="global"), LR(0.1))
            return [Modular(self.net[0].parameters(), *CHAINS["adaptive"]()), head]

        def training_step(self, batch: tuple[Tensor, Tensor]) -> None:
            for opt in self.optimizers():
                with opt.toggle_model():
                    opt.zero_grad()
                    self.manual_backward(self.loss(batch))
                    opt.step()

    model, net = Two([]), network()
    fit(model, tmp_path)
    opts = [
        Modular(net[0].parameters(), *CHAINS["adaptive"]()),
        Modular(net[2].parameters(), ClipNorm(0.1, dim="global"), LR(0.1)),
    ]
    for _ in range(2):
        for x, y in data():
            for opt in opts:
                opt.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                opt.step()
    assert equal(values(model.net), values(net))


class AveragedWeights(lightning.Callback):
    """The callback of the page; it notes the weights at the end of each validation."""

    def on_validation_start(self, trainer: Any, _: Any) -> None:
        for optimizer in trainer.optimizers:
            optimizer.eval()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        for optimizer in trainer.optimizers:
            optimizer.train()

    def on_validation_end(self, trainer: Any, model: Any) -> None:
        self.shown = values(model.net)


class Judged(Lit):
    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("judged", self.loss(batch))


def test_with_a_callback_validations_and_what_is_saved_in_them_have_averaged_weights(tmp_path):
    def run(epochs: int, resume: Any = None) -> tuple[Any, Any]:
        watch = AveragedWeights()
        folder = tmp_path / f"{epochs}{'again' if resume else ''}"
        best = lightning.pytorch.callbacks.ModelCheckpoint(folder, monitor="judged")
        model = Judged(FREE["free"]())
        if resume:
            blank(model)
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=1,
            logger=False,
            callbacks=[watch, best],
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=tmp_path,
        )
        loader = torch.utils.data.DataLoader(data(), batch_size=None)
        trainer.fit(model, loader, loader, ckpt_path=resume)
        return trainer, watch

    straight, watch = run(2)
    (opt,), net = straight.optimizers, straight.lightning_module.net
    assert equal(values(net), watch.shown)
    opt.train()
    assert equal(averaged(opt, net), watch.shown)
    assert not equal(values(net), watch.shown)
    first, _ = run(1)
    path = first.checkpoint_callback.best_model_path
    saved = torch.load(path, weights_only=False)["state_dict"]
    (half,) = first.optimizers
    half.train()
    wanted = averaged(half, first.lightning_module.net)
    assert equal({name: saved[f"net.{name}"] for name in wanted}, wanted)
    second, _ = run(2, path)
    second.optimizers[0].train()
    assert equal(values(second.lightning_module.net), values(net))
