"""Audits of optimizers and of clip functions.

`audit` finds where a step synchronizes with the GPU. `audit_clip` checks norms. `audit_update`
compares the parameters before and after a real step.

`audit` and `audit_clip` need no GPU. `audit` runs a step inside `fake_cuda`, which replaces the GPU
by a fake one. A `Ledger` records all operators of the step.
"""

from torchzero_clip.audit.clip_audit import audit_clip
from torchzero_clip.audit.clip_report import ClipReport, ClipRow
from torchzero_clip.audit.fake_gpu import fake_cuda, twin
from torchzero_clip.audit.findings import Finding
from torchzero_clip.audit.ledger import Ledger, NeedsValues, Request, ledgers, lines, same
from torchzero_clip.audit.lost_updates import Lost
from torchzero_clip.audit.step_audit import StepReport, assert_no_waits, audit
from torchzero_clip.audit.update.expected import Expected
from torchzero_clip.audit.update.update_audit import assert_update, audit_update
from torchzero_clip.audit.update.update_report import (
    CODES,
    UpdateFinding,
    UpdateReport,
    UpdateRow,
)

__all__ = [
    "CODES",
    "ClipReport",
    "ClipRow",
    "Expected",
    "Finding",
    "Ledger",
    "Lost",
    "NeedsValues",
    "Request",
    "StepReport",
    "UpdateFinding",
    "UpdateReport",
    "UpdateRow",
    "assert_no_waits",
    "assert_update",
    "audit",
    "audit_clip",
    "audit_update",
    "fake_cuda",
    "ledgers",
    "lines",
    "same",
    "twin",
]
