"""Processes of this machine as `concurrent.futures` executors whose tasks can be killed.

`ProcessPoolExecutor` cannot end one task: a kernel that hangs would hang the tuner. Here every
worker is a process of its own, killed and replaced when its task takes too long.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from kgen.errors import UsageError

T = TypeVar("T")

READY_SECONDS = 300.0  # for a new process to import what it needs
NICE = 10  # of processes that compile, so that they give way to those that time
# What a task may bring upon its own process; any other signal comes from outside.
OWN_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)

_Item = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class WorkerError(RuntimeError):
    """A task raised, or its process died. The message says which.

    lasting: whether the task is to blame, so that it would end alike another time.
    """

    lasting: bool = True


class MachineError(WorkerError):
    """A task raised for want of disk, memory or the like."""

    lasting = False


class TimeLimitError(WorkerError):
    """A task was killed because it took longer than its limit."""


class KilledError(WorkerError):
    """Somebody else ended the process: for want of memory, or to stop the tuner."""

    lasting = False


class StartError(WorkerError):
    """A process did not get as far as its first task: nothing can run here."""

    lasting = False


# What a worker reports of a task that raised, by the kind that it gives it.
_KINDS: dict[str, type[Exception]] = {
    "user": UsageError, "machine": MachineError, "task": WorkerError,
}  # fmt: skip


class Workers(Executor):
    """`count` processes that take tasks from one queue.

    limit: seconds that a task may take, by default its attribute `limit`; a task over it is killed
    and raises TimeLimitError. A task that raises gives WorkerError, or its own UsageError, and
    ends its process, because a CUDA error leaves a process unusable. prepare: called in every new
    process, outside all limits.
    lock: a file that is locked while a task runs, so that other tuners leave the device alone.
    """

    def __init__(
        self,
        count: int = 1,
        *,
        limit: Callable[..., float] = lambda task: float(task.limit),
        prepare: Callable[[], object] | None = None,
        lock: Path | None = None,
        nice: int = 0,
    ) -> None:
        self._limit, self._prepare, self._lock, self._nice = limit, prepare, lock, nice
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._processes: set[_Worker] = set()
        self._closed = self._stopped = False
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run `fn(*args)` in a worker. `fn` must be importable by name."""
        future: Future[T] = Future()
        with self._guard:
            if self._closed:
                raise RuntimeError("submit after shutdown")
            self._queue.put((future, fn, args, kwargs))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers. cancel_futures: also kills what is running, unlike the base class."""
        with self._guard:
            already, self._closed = self._closed, True
            self._stopped = self._stopped or cancel_futures
            running = list(self._processes) if self._stopped else []
        for worker in running:
            worker.kill()
        if not already:
            for _ in self._threads:
                self._queue.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _serve(self) -> None:
        worker: _Worker | None = None
        try:
            with suppress(StartError):  # told when there is a task that needs it
                worker = self._new()
            while (item := self._queue.get()) is not None:
                future, fn, args, kwargs = item
                if self._stopped:
                    future.cancel()
                if not future.set_running_or_notify_cancel():
                    continue
                try:
                    with self._turn():
                        if worker is None or not worker.alive:
                            worker = self._new()
                        result = worker.call(fn, args, kwargs, self._limit(*args, **kwargs))
                except Exception as error:
                    if worker is not None:
                        self._end(worker)
                    worker = None
                    future.set_exception(error)
                else:
                    future.set_result(result)
        finally:
            if worker is not None:
                self._end(worker)

    def _new(self) -> _Worker:
        try:
            worker = _Worker(self._prepare, self._nice)
        except OSError as error:  # too many processes or open files
            raise StartError(f"no worker process can be started: {error}") from None
        with self._guard:
            self._processes.add(worker)
            stopped = self._stopped
        if stopped:
            worker.kill()
        try:
            worker.ready()
        except (WorkerError, UsageError) as error:
            self._end(worker)
            raise StartError(f"no worker process can be started: {error}") from None
        return worker

    def _end(self, worker: _Worker) -> None:
        worker.kill()
        with self._guard:
            self._processes.discard(worker)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock, if there is one; waiting for another tuner counts to no task's limit."""
        if self._lock is None:
            yield
            return
        from filelock import FileLock, Timeout

        try:
            self._lock.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._lock)
            while True:
                try:
                    lock.acquire(timeout=0.5, poll_interval=0.02)
                    break
                except Timeout:
                    if self._stopped:
                        raise KilledError("stopped while another tuner had the device") from None
        except (OSError, NotImplementedError) as error:
            raise StartError(f"{self._lock}: cannot be locked: {error}") from None
        try:
            yield
        finally:
            lock.release()


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, prepare: Callable[[], object] | None, nice: int) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_work, args=(theirs, prepare, nice), daemon=True, name="kgen-tune"
        )
        self._process.start()
        theirs.close()  # so that the pipe ends with the process

    def ready(self) -> None:
        """Wait until the process can take tasks. Raises: WorkerError."""
        self._answer(READY_SECONDS)

    def call(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], limit: float
    ) -> Any:
        """Run one task. Raises: TimeLimitError, WorkerError."""
        try:
            self._pipe.send((fn, args, kwargs))
        except OSError:
            raise self._death() from None
        return self._answer(limit)

    @property
    def alive(self) -> bool:
        """Whether the process can take another task."""
        return self._process.is_alive()

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        self._process.kill()

    def _answer(self, limit: float) -> Any:
        if not self._pipe.poll(limit):
            raise TimeLimitError(f"killed after {limit:g} s")
        try:
            problem, kind, value = self._pipe.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if problem:
            raise _KINDS[kind](problem)
        return value

    def _death(self) -> WorkerError:
        self._process.join(5)
        code = self._process.exitcode
        if code == -signal.SIGKILL:
            return KilledError("its process was killed")
        if code is not None and code < 0:
            own = -code in OWN_SIGNALS
            return (WorkerError if own else KilledError)(f"its process was ended by signal {-code}")
        return WorkerError(f"its process ended with code {code}")


def _work(pipe: Connection, prepare: Callable[[], object] | None, nice: int) -> None:
    """The loop of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tuner's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if nice and hasattr(os, "nice"):
        os.nice(nice)
    try:
        if prepare is not None:
            prepare()
        pipe.send(("", "", None))
        while True:
            fn, args, kwargs = pipe.recv()
            pipe.send(("", "", fn(*args, **kwargs)))
    except (EOFError, BrokenPipeError):  # the tuner is gone or done
        return
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        if isinstance(error, UsageError):
            text, kind = reason, "user"
        else:
            text = f"{type(error).__name__}: {reason}"
            of_machine = isinstance(error, (OSError, MemoryError)) or "OUT_OF_MEMORY" in reason
            kind = "machine" if of_machine else "task"
        with suppress(OSError):
            pipe.send((text, kind, None))


def _end_with_parent() -> None:
    """A tuner that was killed takes its workers along, even one whose kernel hangs."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
