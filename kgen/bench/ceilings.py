"""The speed of light, measured beside what is compared with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kgen.bench.record import Ceilings
from kgen.bench.timing import Timer, summarise

COPY_FLOATS = 1 << 28  # 1 GiB, many times any L2
MATRIX = 8192  # a product of square matrices that keeps all tensor cores busy
ROUNDS = 20


def measure_ceilings(
    timer: Timer, device: str | torch.device, floats: int = COPY_FLOATS, matrix: int = MATRIX
) -> Ceilings:
    """Copy and fill of `floats` fp32 values, and products of `matrix` x `matrix` operands.

    fp16x3 is a third of fp16: three products stand for one. fp32 is the pipe of plain
    multiply-adds. Less memory is used where the device has not enough.
    """

    def milliseconds(call: Callable[[], object]) -> float:
        call()
        call()
        return summarise([timer.time(call) for _ in range(ROUNDS)]).median

    if torch.device(device).type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        while 8 * floats > free // 2 and floats > 1:
            floats //= 2
    source = torch.zeros(floats, device=device)
    target = torch.empty_like(source)
    copy = 8 * floats / milliseconds(partial(target.copy_, source)) * 1e3
    fill = 4 * floats / milliseconds(partial(target.fill_, 1.0)) * 1e3
    del source, target  # room for the matrices

    flops = 2 * matrix**3
    rates = {}
    allowed = torch.backends.cuda.matmul.allow_tf32
    try:
        for name, dtype, tf32 in (
            ("fp32", torch.float32, False),
            ("tf32", torch.float32, True),
            ("bf16", torch.bfloat16, False),
            ("fp16", torch.float16, False),
        ):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            a, b = (torch.randn(matrix, matrix, device=device, dtype=dtype) for _ in range(2))
            rates[name] = flops / milliseconds(partial(torch.matmul, a, b)) * 1e3
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    rates["fp16x3"] = rates["fp16"] / 3
    return Ceilings(copy_bytes=copy, fill_bytes=fill, mma_flops=rates)
