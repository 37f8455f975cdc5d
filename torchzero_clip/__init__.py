"""torchzero_clip: optimizers for PyTorch that are chains of small transforms."""

import typing

from torchzero_clip import compat, spec
from torchzero_clip._lazy_imports import __dir__ as __dir__
from torchzero_clip._lazy_imports import __getattr__ as __getattr__
from torchzero_clip.attach import Clipper, attach, megatron_entry
from torchzero_clip.batch_norm import fresh_batch_norm
from torchzero_clip.core import (
    Bucket,
    Chain,
    FusedKernel,
    Group,
    Live,
    NormRule,
    Numbers,
    Scope,
    State,
    TensorList,
    TensorwiseTransform,
    Transform,
    Units,
    UnitState,
    zeros_like_state,
)
from torchzero_clip.core.bounds import (
    Count,
    Finite,
    Fraction,
    NonNegative,
    Positive,
    Share,
    Threshold,
    Whole,
    Within,
)
from torchzero_clip.core.layout_patterns import MatrixLayout
from torchzero_clip.floats import to_floats
from torchzero_clip.grads import (
    centralize_grads_,
    clip_grad_norm_,
    clip_grad_percentile_,
    clip_grad_value_,
    normalize_grads_,
)
from torchzero_clip.grouping import groups
from torchzero_clip.modules import adaptive, averages, clipping, descent, flow, matrices
from torchzero_clip.modules.adaptive import *
from torchzero_clip.modules.averages import *
from torchzero_clip.modules.clipping import *
from torchzero_clip.modules.descent import *
from torchzero_clip.modules.flow import *
from torchzero_clip.modules.matrices import *
from torchzero_clip.optimizer import Modular, captured, take_over
from torchzero_clip.optimizer_class import optimizer_class, safe_globals
from torchzero_clip.per_example import PerExample, per_example_clip
from torchzero_clip.published import named
from torchzero_clip.releasing import release
from torchzero_clip.scheduling import schedule

if typing.TYPE_CHECKING:  # `_lazy_imports` imports these names on first use
    from torchzero_clip.recovering import Back, Recover
    from torchzero_clip.study import Recorder, Simulation, Trace, simulate

__version__ = "0.1.0"

__all__ = [
    "Back",
    "Bucket",
    "Chain",
    "Clipper",
    "Count",
    "Finite",
    "Fraction",
    "FusedKernel",
    "Group",
    "Live",
    "MatrixLayout",
    "Modular",
    "NonNegative",
    "NormRule",
    "Numbers",
    "PerExample",
    "Positive",
    "Recorder",
    "Recover",
    "Scope",
    "Share",
    "Simulation",
    "State",
    "TensorList",
    "TensorwiseTransform",
    "Threshold",
    "Trace",
    "Transform",
    "UnitState",
    "Units",
    "Whole",
    "Within",
    "attach",
    "captured",
    "centralize_grads_",
    "clip_grad_norm_",
    "clip_grad_percentile_",
    "clip_grad_value_",
    "compat",
    "fresh_batch_norm",
    "groups",
    "megatron_entry",
    "named",
    "normalize_grads_",
    "optimizer_class",
    "per_example_clip",
    "release",
    "safe_globals",
    "schedule",
    "simulate",
    "spec",
    "take_over",
    "to_floats",
    "zeros_like_state",
]
__all__ += adaptive.__all__
__all__ += averages.__all__
__all__ += clipping.__all__
__all__ += descent.__all__
__all__ += flow.__all__
__all__ += matrices.__all__
