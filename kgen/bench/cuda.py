"""Times on a CUDA device: events, flushed caches, graphs, and what a call costs the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

FLUSH_L2S = 4  # what flushes L2 is this many times its size
SPINS_A_MICROSECOND = 2000  # clocks, at 2 GHz; slower ones hold the device longer
LEAST_HOLD_US, MOST_HOLD_US = 200, 5000
WEARS_OFF = 0.98  # of a hold, with every call: what one hiccup of the host asked for is not kept
HOST_CALLS, HOST_REPEATS = 50, 5


class CudaTimer:
    """CUDA events on the current stream of one device.

    The device spins before the first event until the host has queued the call: what the host takes
    to launch, which differs with whatever else the machine does, is in no figure.
    """

    def __init__(self, device: str | torch.device = "cuda") -> None:
        self.device = torch.device(device)
        self.hold_us = float(LEAST_HOLD_US)
        l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
        self._scratch = torch.empty(FLUSH_L2S * l2 // 4 + 1, device=self.device)

    def time(self, call: Callable[[], object], *, cold: bool = False) -> float:
        """Milliseconds that the device takes for a call. cold: L2 holds lines that no row uses.

        A call that the device could begin before all of it was queued is taken again, behind a spin
        twice as long; at MOST_HOLD_US its time counts as it is, for it may wait for the device.
        """
        with torch.cuda.device(self.device):
            while True:
                start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                if cold:
                    self._scratch.zero_()
                torch.cuda._sleep(round(SPINS_A_MICROSECOND * self.hold_us))  # type: ignore[no-untyped-call]
                start.record()
                call()
                end.record()
                queued = not start.query()  # type: ignore[no-untyped-call]
                end.synchronize()
                if queued or self.hold_us >= MOST_HOLD_US:
                    self.hold_us = max(LEAST_HOLD_US, WEARS_OFF * self.hold_us)
                    return float(start.elapsed_time(end))
                self.hold_us *= 2


def graphed(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The call as a CUDA graph: what its replay takes is the device's time alone.

    A replay returns the graph's output, always the same tensor, and does not wait for it.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # modules are loaded and autotuned before the capture
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()  # lives in the graph's pool
    replay = graph.replay

    def run() -> torch.Tensor:
        replay()
        return y

    return run


def poisoned_replay(replay: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The output of a replay of `graphed` into memory that held NaN before it."""
    replay().fill_(float("nan"))
    return replay()


def host_microseconds(call: Callable[[], object]) -> float:
    """Microseconds that a call keeps the host busy; the device lags behind meanwhile.

    The least of HOST_REPEATS medians: what else the host does only adds.
    """
    return min(_host_median(call) for _ in range(HOST_REPEATS))


def _host_median(call: Callable[[], object]) -> float:
    times = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()  # an empty queue, so that no call waits for room in it
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(times)


def first_call_ms(call: Callable[[], object]) -> float:
    """Milliseconds of a call until its output is there."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)
