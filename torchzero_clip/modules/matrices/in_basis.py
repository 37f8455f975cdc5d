"""InBasis: a rule that applies other rules to a matrix in a different basis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal, cast

from torch import Tensor

from torchzero_clip.core import (
    Bucket,
    Matrices,
    TensorList,
    Transform,
    count_step,
    prepare,
    transformed,
)
from torchzero_clip.core.matrix_steps import record
from torchzero_clip.core.traits import Gate
from torchzero_clip.modules.matrices.eigenbases import back
from torchzero_clip.modules.matrices.inside import check_links
from torchzero_clip.modules.matrices.renewal import renew
from torchzero_clip.modules.matrices.soap_basis import SOAPBasis
from torchzero_clip.modules.matrices.turning import begin, enter, has_passed, mark_passed


class InBasis(Transform, Gate):
    """InBasis rotates a matrix into other bases, applies rules there, and rotates the result back.

    With `SOAPBasis` and `Adam` inside, it is the method SOAP.

    u ← Qₗ links(Qₗᵀ u Qᵣ) Qᵣᵀ

    Only matrices have bases. The rules receive the updates of other parameters without a rotation.
    The state of the rules refers to the bases as well. When the bases change, averages of the
    update are rotated into the new bases. Second moments are sorted in the same order as the
    columns of the bases.

    Args:
        *links: First a link that computes the bases, such as `SOAPBasis`, then the rules to apply
            in this order. If a rule has state with the shape of a parameter, the class of the rule
            must declare the kind of this state in `state_kinds`. Guards, `Freeze` and `Accumulate`
            are not allowed.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, InBasis, Modular, SOAPBasis, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> soap = InBasis(SOAPBasis(every=10), Adam((0.95, 0.95)))
        >>> opt = Modular(model.parameters(), ClipNorm(1.0), soap, WeightDecay(0.01), LR(3e-3))

    Reference:
        Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam", arXiv 2409.11321.
    """

    links: tuple[Transform, ...] = field(default=(), init=False)

    inner = "chain"
    children_before_drop = 1
    reach = "tensor"
    complex = "refuse"
    widens = True
    impure = SOAPBasis.impure

    def __init__(
        self,
        *links: Transform,
        name: str | None = None,
        target: Literal["update", "grad"] = "update",
        state_dtype: Literal["float32", "bfloat16"] | None = None,
    ) -> None:
        self.links = tuple(links)
        self.name = name
        self.target = target
        self.state_dtype = state_dtype

    def check(self) -> None:
        super().check()
        check_links(self.links)

    @property
    def basis(self) -> SOAPBasis:
        """The link that makes the bases."""
        return cast("SOAPBasis", self.links[0])

    def __repr__(self) -> str:
        keywords = [f"{key}={value!r}" for key, value in self.arguments().items()]
        return f"InBasis({', '.join([*map(repr, self.links), *keywords])})"

    @property
    def drops(self) -> bool | Literal["first"]:  # type: ignore[override]
        return "first" if self.basis.first == "skip" else False

    def passed(self, state: Mapping[str, Any]) -> bool:
        return has_passed(state)

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        return prepare(super().prepare(buckets))

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        basis, *inner = buckets[0].bound.children
        seen = [bucket.seen_by(basis) for bucket in buckets]
        now = count_step(seen, "refreshed")
        taken: list[Tensor] = []
        if self.drops:
            buckets = begin(buckets, basis, now, taken)
        if not buckets:
            record(seen, taken)
            return []
        matrices_of_buckets = [Matrices(bucket.seen_by(basis), now) for bucket in buckets]
        rotated = [enter(*pair, inner) for pair in zip(buckets, matrices_of_buckets, strict=True)]
        results = transformed(buckets, rotated, inner)
        for bucket, matrices, u in zip(buckets, matrices_of_buckets, results, strict=True):
            if self.drops:
                mark_passed(bucket)
            rotated_back = matrices.over([u.tensors], lambda batch, x: back(x[0], batch.state))
            bucket.u = TensorList(rotated_back)
            matrices.begin()
            if self.basis.first != "step":
                renew(bucket, matrices, inner, matrices.where)
            taken += matrices.taken
        record(seen, taken)
        return buckets
