"""What is right: the block in torch ops, its fp64 oracle, random problems to test on.

Every function takes parameters as a dict of tensors by state_dict key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kgen.geometry import geometry
from kgen.ops import OPS
from kgen.spec import Spec

CHUNK_BYTES = 1 << 29  # of fp64 convolution output that the oracle holds at a time

Parameters = dict[str, torch.Tensor]


@contextmanager
def exact_fp32() -> Iterator[None]:
    """Convolutions in true fp32, deterministic; torch's flags are restored afterwards."""
    with torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    ):
        yield


def parameter_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Shapes of the block's parameters by state_dict key, in the eager block's order."""
    problem, C_out = spec.problem, spec.problem.out_channels
    bias = {"conv.bias": (C_out,)} if problem.conv_bias else {}
    return {
        "conv.weight": (C_out, problem.in_channels, *problem.kernel_size),
        **bias,
        **dict.fromkeys(spec.parameters, (C_out, 1, 1)),
        "group_norm.weight": (C_out,),
        "group_norm.bias": (C_out,),
    }


def chain_function(expression: str) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """An op of `kgen.ops` as a function of v and its parameter; torch.compile can trace it."""
    namespace: dict[str, Any] = {"torch": torch}
    body = f"def apply(v, parameter):\n    return {expression.format(parameter='parameter')}\n"
    exec(compile(body, "<kgen.ops>", "exec"), namespace)  # our own table, no user text
    apply: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] = namespace["apply"]
    return apply


def block(spec: Spec, x: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """The block in torch ops, in the dtype of its inputs: [N, C_in, H, W] -> [N, C_out, P, Q]."""
    problem = spec.problem
    v = torch.nn.functional.conv2d(
        x,
        parameters["conv.weight"],
        parameters.get("conv.bias"),
        stride=problem.stride,
        padding=problem.padding,
        dilation=problem.dilation,
    )
    for step in spec.pointwise:
        parameter = None if step.parameter is None else parameters[step.parameter]
        v = chain_function(OPS[step.op].torch)(v, parameter)
    return torch.nn.functional.group_norm(
        v,
        spec.norm.num_groups,
        parameters["group_norm.weight"],
        parameters["group_norm.bias"],
        spec.norm.eps,
    )


def chunks(spec: Spec, x: torch.Tensor) -> Iterator[slice]:
    """Slices of the batch whose fp64 intermediates stay near CHUNK_BYTES each."""
    per_sample = max(1, 8 * geometry(spec.problem).y_elements)
    step = max(1, CHUNK_BYTES // per_sample)
    for start in range(0, x.shape[0], step):
        yield slice(start, min(start + step, x.shape[0]))


def oracle(spec: Spec, x: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """The block in fp64 from the same fp32 inputs; float64 [N, C_out, P, Q] on x's device."""
    with torch.no_grad(), exact_fp32():
        return block(spec, x.double(), {key: one.double() for key, one in parameters.items()})


def eager_fp32(spec: Spec, x: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """What PyTorch itself computes in fp32 with TF32 off."""
    with torch.no_grad(), exact_fp32():
        return block(spec, x, parameters)


class EagerBlock(nn.Module):
    """The eager module that an emitted package replaces: the same parameters, order and keys."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        problem = spec.problem
        self.spec = spec
        self.conv = nn.Conv2d(
            problem.in_channels,
            problem.out_channels,
            problem.kernel_size,
            stride=problem.stride,
            padding=problem.padding,
            dilation=problem.dilation,
            bias=problem.conv_bias,
        )
        for name in spec.parameters:
            self.register_parameter(name, nn.Parameter(torch.randn(problem.out_channels, 1, 1)))
        self.group_norm = nn.GroupNorm(
            spec.norm.num_groups, problem.out_channels, eps=spec.norm.eps
        )
        self.steps = [
            (chain_function(OPS[step.op].torch), step.parameter) for step in spec.pointwise
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, C_in, H, W] -> y [N, C_out, P, Q]."""
        v = self.conv(x)
        for function, name in self.steps:
            v = function(v, None if name is None else getattr(self, name))
        y: torch.Tensor = self.group_norm(v)
        return y


CONSTANT, HUGE = 0.7502, 10003.7  # of more bits than fp16 or tf32 hold, so that rounding shows

DISTRIBUTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    # name -> (uniform in [0, 1), normal) -> x; both of x's shape
    "uniform": lambda uniform, normal: uniform,
    "normal x3": lambda uniform, normal: normal * 3,
    "x0.01": lambda uniform, normal: uniform * 0.01,
    "x-1": lambda uniform, normal: -uniform,
    "constant": lambda uniform, normal: torch.full_like(uniform, CONSTANT),
    "one huge value": lambda uniform, normal: _with_huge_value(uniform),
    "large weights": lambda uniform, normal: uniform * SMALL,
}
SMALL = 2.0**-15
LARGE = 2.0**18  # of the weights then: more than fp16 holds, while the convolution stays small


def _with_huge_value(x: torch.Tensor) -> torch.Tensor:
    x[x.shape[0] // 2, x.shape[1] // 2, x.shape[2] // 2, x.shape[3] // 2] = HUGE
    return x


def draw(
    spec: Spec, batch: int, distribution: str, seed: int, device: str | torch.device
) -> tuple[torch.Tensor, Parameters]:
    """A random problem: x [batch, C_in, H, W] and parameters, none at a default value, all fp32.

    Weights are scaled by 1 / sqrt(taps), so that the convolution's output has the scale of x, and
    by LARGE for "large weights";
    factors (scale, gamma) lie in +-[0.5, 1.5], so that none of them hides what it multiplies.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    g = geometry(spec.problem)
    shape = (batch, g.C_in, g.H, g.W)
    x = DISTRIBUTIONS[distribution](
        uniform(*shape), normal(*shape) if "normal" in distribution else torch.empty(0)
    )
    factors = {step.parameter for step in spec.pointwise if OPS[step.op].fold == "*"}
    parameters = {}
    for key, size in parameter_shapes(spec).items():
        if key == "conv.weight":
            large = LARGE if distribution == "large weights" else 1.0
            parameters[key] = normal(*size) * (large / g.taps**0.5)
        elif key in factors or key == "group_norm.weight":
            parameters[key] = (uniform(*size) + 0.5) * (2.0 * (uniform(*size) < 0.5) - 1.0)
        else:
            parameters[key] = normal(*size)
    return x, parameters
