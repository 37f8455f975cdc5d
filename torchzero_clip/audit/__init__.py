"""Audits: `audit` finds where a step synchronizes with the GPU, and `audit_clip` checks norms.

Both run on a machine without a GPU. `audit` runs a step inside `fake_cuda`, which replaces the GPU
by a fake one. A `Ledger` records all operators of the step.
"""

from torchzero_clip.audit.clip_audit import audit_clip
from torchzero_clip.audit.clip_report import ClipReport, ClipRow
from torchzero_clip.audit.fake_gpu import fake_cuda, twin
from torchzero_clip.audit.findings import Finding
from torchzero_clip.audit.ledger import Ledger, NeedsValues, Request, ledgers, lines, same
from torchzero_clip.audit.lost_updates import Lost
from torchzero_clip.audit.step_audit import StepReport, assert_no_waits, audit

__all__ = [
    "ClipReport",
    "ClipRow",
    "Finding",
    "Ledger",
    "Lost",
    "NeedsValues",
    "Request",
    "StepReport",
    "assert_no_waits",
    "audit",
    "audit_clip",
    "fake_cuda",
    "ledgers",
    "lines",
    "same",
    "twin",
]
