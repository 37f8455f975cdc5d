"""pytorch_optimizer's tests of any optimizer, with every published name in its table.

Its tests go over `OPTIMIZERS`: arguments that make no sense, gradients that are missing, sparse or
complex, a checkpoint that is resumed, a loss that falls by a third in a few steps.
"""

from __future__ import annotations

from typing import Any

from torchzero_clip import ClipNorm

from .chains import NAMES, Published, published

SOURCE = "kozistr/pytorch_optimizer"
COMMIT = "v4.1.0"
FILES = {
    "tests/test_general_optimizer_parameters.py": "877d7147ccfb",
    "tests/test_gradients.py": "d128d46e9c96",
    "tests/test_optimizers.py": "f7df3a27f2ca",
}
PATHS = ["."]
SETTINGS: dict[str, str] = {}
THEIRS = {"mars": "mars_adamw", "stableadamw": "stable_adamw", "stablespam": "stable_spam"}
OURS = {name: name for name in NAMES} | THEIRS

ITS_OWN = (
    "adam adamw_lr ams_bound bias_correction cautious centered constraint degenerated_to_sgd "
    "density fixed_decay grad_averaging lr_1d mars_type max_grad_norm merge_dims rectify "
    "scale_parameter t_alpha_beta3 update_proj_gap update_scale use_adjusted_lr use_gc "
    "weight_decouple"
)

LEFT_OUT = {
    rf"\[(?!({'|'.join(OURS)})(_\(|\]))": "no chain has this name",
    rf"'({ITS_OWN.replace(' ', '|')})'|'eps': None|shampoo_.*momentum|test_norm|"
    r"resume\[(spam|stablespam|adafactor|kron)\]|frequency\[shampoo": "an argument that it alone "
    "has",
    "test_init_group": "about a method of its own",
}
DIFFERS = {
    r"epsilon\[(adafactor|came)\]": "`eps` is a pair here, and one number another error than a "
    "negative one",
    r"test_training\[lars_": "its LARS leaves vectors to plain momentum; ours scales every tensor",
    r"test_training\[lamb_": "its LAMB steps by lr / (1 - β₁ᵗ), ten times lr at first; ours by lr",
    r"test_training\[radam_.*complex": "at a rate of 5 its RAdam, which stands still at first, "
    "comes nearer; ours steps by the momentum then, as torch's does",
}


def put_ours() -> None:
    import pytorch_optimizer.optimizer as theirs
    from pytorch_optimizer.base import exception

    class WithTheirErrors(Published):
        """The same refusals, under the classes that their tests catch."""

        def __init__(self, *args: Any, pre_norm: bool = False, **kwargs: Any) -> None:
            self.front = (ClipNorm(1.0, dim="global"),) if pre_norm else ()
            try:
                super().__init__(*args, **kwargs)
            except ValueError as error:
                if ": lr must be a number at least 0" in str(error):
                    raise exception.NegativeLRError(-1.0) from error
                raise

        def step(self, closure: Any = None) -> Any:
            try:
                return super().step(closure)
            except (TypeError, ValueError) as error:
                if "complex" in str(error):
                    raise exception.NoComplexParameterError(self.method) from error
                if "sparse gradients are not supported" in str(error):
                    raise exception.NoSparseGradientError(self.method) from error
                raise

    ours = {name: published(of, name, WithTheirErrors) for name, of in OURS.items()}
    theirs.OPTIMIZERS.clear()
    theirs.OPTIMIZERS.update(ours)
