"""Sizes that follow from a problem alone: output, padding, work and compulsory bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kgen.spec import Problem


@dataclass(frozen=True)
class Geometry:
    """The convolution's dimensions in the field's names; x [N, C_in, H, W], y [N, C_out, P, Q].

    N is None where the batch is dynamic. Padding is (top, left) before and (bottom, right) after.
    """

    N: int | None
    C_in: int
    H: int
    W: int
    C_out: int
    R: int
    S: int
    stride: tuple[int, int]
    dilation: tuple[int, int]
    pad_before: tuple[int, int]
    pad_after: tuple[int, int]

    @cached_property
    def extent(self) -> tuple[int, int]:
        """Rows and columns that the dilated filter spans."""
        return ((self.R - 1) * self.dilation[0] + 1, (self.S - 1) * self.dilation[1] + 1)

    @cached_property
    def padded(self) -> tuple[int, int]:
        """Rows and columns of the padded input."""
        return (
            self.H + self.pad_before[0] + self.pad_after[0],
            self.W + self.pad_before[1] + self.pad_after[1],
        )

    @cached_property
    def P(self) -> int:  # noqa: N802
        """Output rows; below 1 where the filter does not fit (a rule of `kgen.constraints`)."""
        return (self.padded[0] - self.extent[0]) // self.stride[0] + 1

    @cached_property
    def Q(self) -> int:  # noqa: N802
        """Output columns; below 1 where the filter does not fit."""
        return (self.padded[1] - self.extent[1]) // self.stride[1] + 1

    @cached_property
    def taps(self) -> int:
        """Multiply-adds of one output element: C_in * R * S."""
        return self.C_in * self.R * self.S

    @cached_property
    def x_elements(self) -> int:
        """Input elements of one sample."""
        return self.C_in * self.H * self.W

    @cached_property
    def y_elements(self) -> int:
        """Output elements of one sample."""
        return self.C_out * self.P * self.Q


def geometry(problem: Problem) -> Geometry:
    """The geometry of a problem.

    `padding: same` follows PyTorch: an even filter extent pads one row or column more after than
    before.
    """
    (R, S), (dil_h, dil_w) = problem.kernel_size, problem.dilation
    if problem.padding == "same":
        total = (dil_h * (R - 1), dil_w * (S - 1))
        before = (total[0] // 2, total[1] // 2)
        after = (total[0] - before[0], total[1] - before[1])
    else:
        before = after = problem.padding
    return Geometry(
        N=None if problem.batch == "dynamic" else problem.batch,
        C_in=problem.in_channels,
        H=problem.height,
        W=problem.width,
        C_out=problem.out_channels,
        R=R,
        S=S,
        stride=problem.stride,
        dilation=problem.dilation,
        pad_before=before,
        pad_after=after,
    )
