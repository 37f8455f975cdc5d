"""Rules about whole matrices: their singular values and their rows."""

from torchzero_clip.modules.matrices.clip_spectral import ClipSpectral
from torchzero_clip.modules.matrices.equal_rows import EqualRows
from torchzero_clip.modules.matrices.neuron_norm import NeuronNorm
from torchzero_clip.modules.matrices.orthogonalize import Orthogonalize

__all__ = ["ClipSpectral", "EqualRows", "NeuronNorm", "Orthogonalize"]
