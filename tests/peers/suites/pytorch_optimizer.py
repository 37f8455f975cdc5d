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
    rf"\[(?!({'|'.join(OURS)})(_\(|\]))": "no method of this library has this name",
    rf"'({ITS_OWN.replace(' ', '|')})'|'eps': None|shampoo_.*momentum|test_norm|"
    r"resume\[(spam|stablespam|adafactor|kron)\]|frequency\[shampoo": "the case uses an "
    "argument that only pytorch_optimizer has",
    "test_init_group": "the case tests a method that only pytorch_optimizer has",
}
DIFFERS = {
    r"epsilon\[(adafactor|came)\]": "`eps` is a pair in this library, so a single number raises "
    "another "
    "error than a negative number",
    r"test_training\[lars_": "its LARS uses plain momentum for vectors, and ours scales every "
    "tensor",
    r"test_training\[lamb_": "its LAMB uses lr / (1 - β₁ᵗ), at first ten times lr, and ours "
    "uses lr",
    r"test_training\[radam_.*complex": "at a learning rate of 5, its RAdam does not move at "
    "first and ends "
    "nearer, and ours steps by the momentum, as torch's does",
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
                if ": lr must be a finite number of at least 0" in str(error):
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
