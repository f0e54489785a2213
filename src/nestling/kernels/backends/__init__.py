"""Who computes the 3x3 convolutions of a training pass: one file for each generation of chips or language, in one list.

A new one is a module with what `Backend` asks for and a line in BACKENDS. Its tiles come from tiles/, a file for each chip,
written by benchmarks/kernels.py --tune --table. proof.py takes the first that suits and whose results are right.
"""

from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from nestling.kernels.backends import sm80, sm90, triton

KernelName = Literal["stem", "forward", "back", "weights"]  # stem: a convolution of the pictures themselves


class Backend(Protocol):
    """3x3 convolutions of channels-last images, of stride 1, padded by 1, with weights (out, 3, 3, in)."""

    @property
    def NAME(self) -> str: ...

    def suits(self, kernel: KernelName, x: Tensor, cout: int) -> bool:
        """Whether it has this kernel, for images like x that become `cout` channels, on x's device."""

    def halves(self, device: torch.device, cin: int, cout: int, size: tuple[int, ...]) -> bool:
        """Whether a convolution of stride 2 is best done there as one of stride 1 of which a quarter is kept."""

    def tiles(self, kernel: KernelName, x: Tensor, cout: int) -> list[Any]:
        """Ways to cut the work, the fastest first: others are tried in turn if its results are wrong."""

    def candidates(self, kernel: KernelName, x: Tensor, cout: int) -> list[Any]:
        """Ways to cut the work that are worth a measurement."""

    def forward(
        self,
        x: Tensor,
        affine: Tensor | None,
        weight: Tensor,
        cout: int,
        tiles: Any,
        *,
        shortcut: Tensor | None = None,
        moments: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """h = relu(norm(x)), or x if there is no norm; its convolution plus a shortcut; that one's partial moments, if wanted."""

    def back(self, dy: Tensor, weight: Tensor, z: Tensor, affine: Tensor, tiles: Any) -> tuple[Tensor, Tensor]:
        """The transpose of `forward` as far as the norm's output, and the two sums that the norm's backward needs."""

    def weights(self, xs: list[Tensor], dys: list[Tensor], tiles: Any) -> list[Tensor]:
        """Weight gradients of layers of one shape, each in parts to be added up: (parts, out * 3 * 3 * in)."""


BACKENDS: list[Backend] = [sm90, sm80, triton]  # in order of preference; the last one suits everything


class Choice(NamedTuple):
    backend: Backend
    tiles: Any


def choices(kernel: KernelName, x: Tensor, cout: int) -> list[Choice]:
    """All that suit, the best first."""
    suited = [backend for backend in BACKENDS if backend.suits(kernel, x, cout)]
    return [Choice(backend, tiles) for backend in suited for tiles in backend.tiles(kernel, x, cout)]


def halves(device: torch.device, cin: int, cout: int, size: tuple[int, ...]) -> bool:
    return any(backend.halves(device, cin, cout, size) for backend in BACKENDS)
