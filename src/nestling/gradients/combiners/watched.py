"""Weightings that follow from the losses' values: the shared half.

In come the values of each step's losses (`see`), averaged over the ranks; out come weights, known before any gradient where the
method needs none. What is learnt is a parameter: give `parameters()` to the optimizer where there are some.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nestling.errors import NestlingError
from nestling.gradients import Blocks
from nestling.gradients.combiners.diagnosis import Report
from nestling.gradients.combiners.weighted import Weighted


class Watched(Weighted):
    """A weighting of `tasks` losses."""

    watches = True

    def __init__(self, tasks: int) -> None:
        super().__init__()
        if tasks < 1:
            raise NestlingError(f"tasks is {tasks}: expected the number of losses")
        self.tasks = tasks
        self.values = torch.ones(tasks, dtype=torch.float64)

    def parameters(self) -> Iterator[nn.Parameter]:
        """What an optimizer has to learn."""
        return iter(())

    def see(self, values: Tensor) -> None:
        """The values of this step's losses, (tasks,)."""
        if len(values) != self.tasks:
            raise NestlingError(
                f"found {len(values)} losses, expected {self.tasks}: the number this weighting was made for"
            )
        self.values = values

    def share(self) -> Tensor:
        """The weights, (tasks,), on the device of the losses."""
        raise NotImplementedError

    def weights(self, gram: Tensor, blocks: Blocks) -> Tensor:
        return self.share().to(gram).expand(gram.shape[:-1])

    def fixed(self, tasks: int, device: torch.device) -> tuple[Tensor, Report] | None:
        weights = self.share().to(device, torch.float64)
        return weights, Report(weights=weights[None])
