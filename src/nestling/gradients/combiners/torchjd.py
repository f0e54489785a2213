"""A bridge to TorchJD, both ways; imported only by who has it installed (extra `compare`).

`FromTorchJD(aggregator)` lets any TorchJD aggregator combine our rows. `OSGDAggregator` and `OSGDWeighting` offer
OSGD to TorchJD's own `jac_to_grad` and autogram engine.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchjd.aggregation import Aggregator, GramianWeightedAggregator, Weighting

from nestling.errors import NestlingError
from nestling.gradients import Blocks, Combiner, TaskRows
from nestling.gradients.combiners.diagnosis import Report
from nestling.gradients.combiners.osgd import OSGD
from nestling.gradients.combiners.solved import Solved


class FromTorchJD(Combiner[Report]):
    """Rows to update by a TorchJD aggregator.

    One that needs only the Gram matrix gets it and our rows stay compact; any other sees the padded dense matrix. `scope`: what
    one aggregation is about; "shared" leaves heads alone, as torchjd.autojac.mtl_backward does.
    """

    def __init__(self, aggregator: Aggregator, scope: str = "all") -> None:
        self.aggregator = aggregator
        self.scope = scope
        if scope not in ("all", "shared") and not isinstance(aggregator, GramianWeightedAggregator):
            raise NestlingError(
                f"scope is {scope!r}, but {type(aggregator).__name__} needs whole rows: expected scope='all' or 'shared', or an "
                f"aggregator that the Gram matrix is enough for"
            )

    @property
    def owners_matter(self) -> bool:
        return self.scope in ("shared", "block")

    def __call__(self, rows: TaskRows) -> Report:
        if self.scope != "all" and isinstance(self.aggregator, GramianWeightedAggregator):
            return _Scoped(self.aggregator, self.scope)(rows)
        gram = rows.gram(self.scope)
        private = rows.blocks(self.scope).private if rows.certain else None
        if isinstance(self.aggregator, GramianWeightedAggregator):
            weights = rows.agreed(self.aggregator.gramian_weighting(gram[0])[None])
            rows.write(weights)
            return Report(weights=weights, gram=gram, private=private)
        rows.write_vector(rows.agreed(self._vector(rows)))
        return Report(weights=None, gram=gram, private=private)

    def _vector(self, rows: TaskRows) -> Tensor:
        """The update over all entries; where one task owns an entry alone and the scope leaves it out, its own gradient."""
        dense = rows.matrix()
        if self.scope == "all":
            whole: Tensor = self.aggregator(dense)
            return whole
        update, shared = dense.sum(0), rows.shared()
        if bool(shared.any()):
            update[shared] = self.aggregator(dense[:, shared])
        return update


class _Scoped(Solved):
    """One aggregation per block."""

    random = True  # some draw by chance: ranks take the first one's

    def __init__(self, aggregator: Aggregator, scope: str) -> None:
        super().__init__(scope)
        assert isinstance(aggregator, GramianWeightedAggregator)
        self.weighting = aggregator.gramian_weighting

    def solve(self, gram: Tensor) -> Tensor:
        found: Tensor = self.weighting(gram)
        return found


class OSGDWeighting(Weighting[Tensor]):
    """Gram matrix to the weights of OSGD, for TorchJD. Sums in float64 from the Gram matrix on."""

    def __init__(self, order: Sequence[int] | None = None, importance: Sequence[float] | None = None) -> None:
        super().__init__()
        self.method = OSGD(order=order, importance=importance)

    def forward(self, gramian: Tensor, /) -> Tensor:
        gram = gramian[None].double()
        all_owned = torch.ones(gram.shape[:2], dtype=torch.bool, device=gram.device)
        blocks = Blocks(all_owned, all_owned, torch.ones(gram.shape[1], dtype=gram.dtype, device=gram.device))
        return self.method.weights(gram, blocks)[0].to(gramian.dtype)


class OSGDAggregator(GramianWeightedAggregator):
    """OSGD as a TorchJD aggregator: `jac_to_grad(model.parameters(), OSGDAggregator(order=[...]))`."""

    def __init__(self, order: Sequence[int] | None = None, importance: Sequence[float] | None = None) -> None:
        super().__init__(OSGDWeighting(order, importance))
