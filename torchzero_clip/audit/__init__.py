"""Audit: what a step would ask of a GPU, on a machine without one, and whether norms are right."""

from torchzero_clip.audit.clipping import ClipReport, ClipRow, audit_clip
from torchzero_clip.audit.device import fake_cuda, twin
from torchzero_clip.audit.ledger import Ledger, Request, ledgers, lines, same

__all__ = [
    "ClipReport",
    "ClipRow",
    "Ledger",
    "Request",
    "audit_clip",
    "fake_cuda",
    "ledgers",
    "lines",
    "same",
    "twin",
]
