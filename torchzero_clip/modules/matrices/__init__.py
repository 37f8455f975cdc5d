"""Rules for matrices: they change singular values, rows, or the basis of the update."""

from torchzero_clip.core.layout_patterns import heads
from torchzero_clip.core.logical_matrices import join_matrices, logical_matrices
from torchzero_clip.modules.matrices.clip_spectral import ClipSpectral
from torchzero_clip.modules.matrices.equal_rows import EqualRows
from torchzero_clip.modules.matrices.in_basis import InBasis
from torchzero_clip.modules.matrices.kl_basis import KLBasis
from torchzero_clip.modules.matrices.kron import Kron
from torchzero_clip.modules.matrices.layout_of import layout_of
from torchzero_clip.modules.matrices.neuron_norm import NeuronNorm
from torchzero_clip.modules.matrices.orthogonalize import Orthogonalize
from torchzero_clip.modules.matrices.rows import Rows
from torchzero_clip.modules.matrices.scale_by_shape import ScaleByShape
from torchzero_clip.modules.matrices.shampoo import Shampoo
from torchzero_clip.modules.matrices.soap_basis import SOAPBasis

__all__ = [
    "ClipSpectral",
    "EqualRows",
    "InBasis",
    "KLBasis",
    "Kron",
    "NeuronNorm",
    "Orthogonalize",
    "Rows",
    "SOAPBasis",
    "ScaleByShape",
    "Shampoo",
    "heads",
    "join_matrices",
    "layout_of",
    "logical_matrices",
]
