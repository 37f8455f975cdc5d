"""The rules as pure functions of plain numbers. The kernels are tested against these functions.

A rule receives one unit: the elements `xs` of a tensor, a slice, a layer, a group or a whole model.
Some rules receive only the norm `n` of a unit. Rules with elementwise state receive one element
`x`. A rule with state is one step, `(input, state) -> (output, new state)`. The state before the
first step is the state type called without arguments. The function `run` applies the step to many
inputs.

Numbers are int, float, Fraction or Decimal. Fractions stay exact unless a root is computed.
Decimals need Decimal hyperparameters. NaN and inf are floats. The functions do not check their
arguments. The classes of rules check theirs. All functions follow four conventions:

* If nothing has to be clipped, a rule returns the numbers themselves.
* A unit that is empty, or whose norm is zero, is not changed.
* A NaN norm gives NaN. An infinite norm gives 0 for finite elements and NaN for infinite ones. In
  both cases a rule with state returns the state it was given, as if the step had not happened.
* A limit of 0 gives zeros, and a limit of inf never clips, whatever the norm.
"""

from torchzero_clip.spec.by_average import (
    Average,
    clip_norm_by_ema,
    clip_value_by_ema,
    normalize_by_ema,
)
from torchzero_clip.spec.growth import (
    Growth,
    clip_norm_growth,
    clip_value_growth,
    growth_limit,
)
from torchzero_clip.spec.past_norms import (
    CLIPPINGS,
    Clipping,
    Moments,
    Powers,
    Reference,
    WarmUp,
    ada_gc,
    adaptive_clip,
    ema_ratio,
    moments,
    z_clip,
    z_limit,
    z_score_clip,
    z_score_threshold,
    z_stat,
)
from torchzero_clip.spec.plain_numbers import (
    POWERS,
    STATISTICS,
    Order,
    Real,
    Vector,
    finite,
    norm,
    run,
)
from torchzero_clip.spec.quantiles import (
    Markers,
    Record,
    Tracked,
    auto_clip,
    ema_quantile,
    geometric_quantile,
    interpolated_quantile,
    p2_estimate,
    p2_observe,
    p2_quantile,
    quantile,
)
from torchzero_clip.spec.spikes import (
    SpikeState,
    skip_spike,
)
from torchzero_clip.spec.without_state import (
    agc,
    centralize,
    clip_by,
    clip_norm,
    clip_percentile,
    clip_rms,
    clip_value,
    clippy,
    delta_clip,
    nan_to_num,
    normalize,
    sign,
    soft_clip,
    standardize,
)

__all__ = [
    "CLIPPINGS",
    "POWERS",
    "STATISTICS",
    "Average",
    "Clipping",
    "Growth",
    "Markers",
    "Moments",
    "Order",
    "Powers",
    "Real",
    "Record",
    "Reference",
    "SpikeState",
    "Tracked",
    "Vector",
    "WarmUp",
    "ada_gc",
    "adaptive_clip",
    "agc",
    "auto_clip",
    "centralize",
    "clip_by",
    "clip_norm",
    "clip_norm_by_ema",
    "clip_norm_growth",
    "clip_percentile",
    "clip_rms",
    "clip_value",
    "clip_value_by_ema",
    "clip_value_growth",
    "clippy",
    "delta_clip",
    "ema_quantile",
    "ema_ratio",
    "finite",
    "geometric_quantile",
    "growth_limit",
    "interpolated_quantile",
    "moments",
    "nan_to_num",
    "norm",
    "normalize",
    "normalize_by_ema",
    "p2_estimate",
    "p2_observe",
    "p2_quantile",
    "quantile",
    "run",
    "sign",
    "skip_spike",
    "soft_clip",
    "standardize",
    "z_clip",
    "z_limit",
    "z_score_clip",
    "z_score_threshold",
    "z_stat",
]
