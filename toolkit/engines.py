"""Engines: how calls reach the ranks.

`KernelRanks` is one rank, the kernel process itself. `LocalRanks` are processes on this machine, one pipe and one control
pipe each, forked from a server that has torch, transformers and AutoModel imported (multiprocessing's "forkserver"), so
that only the first launch in a kernel pays for the imports.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.context
import os
import shutil
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.background import count_interrupts
from toolkit.progress import Bars
from toolkit.ranks import Message, Ranks, emitting_to, execute, set_stop

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Imported once in the fork server, so that ranks start in a tenth of a second. Nothing here may touch CUDA.
_PRELOAD = ["toolkit.imports", "toolkit.worker", "toolkit.memory", "toolkit.divergence"]

_in_kernel = threading.RLock()  # sessions in this process share its random numbers, its settings and the request to stop
_hiding = threading.Lock()


class KernelRanks(Ranks):
    """One rank: the kernel process itself, so that a debugger, `%timeit` and printed tensors just work."""

    n = 1

    def __init__(self) -> None:
        super().__init__()

    def call(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """See `Ranks.call`; everything happens in this process, so nothing is pickled."""
        with self._lock:
            self.raise_if_lost()
            with (
                _in_kernel,
                Bars() as bars,
                emitting_to(lambda message: bars.update(*message[1:])),
                count_interrupts(on_first=set_stop) as interrupts,
            ):
                try:
                    result = fn(*args)
                except Exception as error:
                    error.rank = 0  # type: ignore[attr-defined]
                    raise
        self.interrupted_late |= interrupts.count > 0
        return [result]

    def connect(self, device: str) -> None:
        from torch._C._distributed_c10d import HashStore

        self.call(connect, 0, 1, device, HashStore())

    def _kill(self) -> None:
        pass


class LocalRanks(Ranks):
    """Processes on this machine, forked from a server that has torch, transformers and AutoModel imported."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        context = _fork_server()
        self._folder = Path(tempfile.mkdtemp(prefix="toolkit-ranks-"))
        self._messages: list[Connection] = []
        self._control: list[Connection] = []
        self._processes: list[BaseProcess] = []
        num_threads = max(1, len(os.sched_getaffinity(0)) // n)
        for rank in range(n):
            mine, theirs = context.Pipe()
            control_theirs, control_mine = context.Pipe(duplex=False)
            env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(n),
                "GLOO_SOCKET_IFNAME": "lo",  # nobody outside this machine may reach a rank
                "NCCL_SOCKET_IFNAME": "lo",
            }
            process = context.Process(
                target=_rank_main,
                args=(rank, theirs, control_theirs, env, num_threads),
                daemon=True,
                name=f"rank {rank}",
            )
            with _main_module_hidden(), _interrupt_held():
                process.start()
            theirs.close()
            control_theirs.close()
            self._messages.append(mine)
            self._control.append(control_mine)
            self._processes.append(process)
        # A dropped session ends its ranks like a closed one.
        self._finalizer = weakref.finalize(
            self, _end, list(self._processes), [*self._messages, *self._control], str(self._folder)
        )

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [p.pid for p in self._processes if p.pid is not None]

    def connect(self, device: str) -> None:
        self.call(_connect_from_env, device, str(self._folder / "rendezvous"))

    def _send(self, rank: int, blob: bytes) -> None:
        with contextlib.suppress(OSError):  # dead: _next reports it
            self._messages[rank].send_bytes(blob)

    def _next(self, pending: set[int], timeout: float) -> tuple[int, Message] | None:
        by_pipe = {self._messages[rank]: rank for rank in pending}
        ready = wait([*by_pipe, *(p.sentinel for p in self._processes)], timeout)
        for handle in ready:  # what a rank still said before what became of it
            if isinstance(handle, Connection):
                rank = by_pipe[handle]
                try:
                    return rank, handle.recv()
                except (EOFError, OSError):
                    return rank, self._death(rank)
        for rank, process in enumerate(self._processes):
            if process.sentinel in ready:
                return rank, self._death(rank)
        return None

    def _death(self, rank: int) -> Message:
        process = self._processes[rank]
        process.join(2)
        code = process.exitcode
        name = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return ("dead", name)

    def _ask_to_stop(self, call: int) -> None:
        for control in self._control:
            with contextlib.suppress(OSError):
                control.send_bytes(str(call).encode())

    def _kill(self) -> None:
        self._finalizer()


def local_ranks_warm_up() -> None:
    """Start importing torch and AutoModel in the fork server now, in the background, so that ranks start at once later."""
    from multiprocessing import forkserver

    _fork_server()
    with _main_module_hidden(), _interrupt_held():
        forkserver.ensure_running()


def end_fork_server() -> None:
    """Kill the fork server if there is one: left alone, it outlives this process until its imports are done."""
    from multiprocessing import forkserver

    pid = vars(forkserver._forkserver)["_forkserver_pid"]  # there is no public way
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def _fork_server() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _connect_from_env(device: str, rendezvous: str) -> None:
    from torch._C._distributed_c10d import FileStore

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    connect(rank, world_size, device, FileStore(rendezvous, world_size), gpu=rank)


def _end(processes: list[BaseProcess], pipes: list[Connection], folder: str) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join(5)
    for pipe in pipes:
        pipe.close()
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep multiprocessing from importing the user's script in each rank: functions travel by value."""
    with _hiding:  # ranks may be started from several threads
        names = sys.modules["__main__"].__dict__
        saved: dict[str, Any] = {name: names.pop(name) for name in ("__file__", "__spec__") if name in names}
        names["__spec__"] = None
        try:
            yield
        finally:
            del names["__spec__"]
            names.update(saved)


@contextlib.contextmanager
def _interrupt_held() -> Iterator[None]:
    """Let a fork server that starts now inherit a blocked SIGINT: a terminal's Ctrl-C reaches its whole process group, and
    would end the server in the middle of its imports, with a traceback among the user's output."""
    resource_tracker.ensure_running()  # its own start unblocks SIGINT at the end
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in a rank's process


def _rank_main(rank: int, messages: Connection, control: Connection, env: dict[str, str], num_threads: int) -> None:
    os.setsid()  # the kernel interrupts its whole process group; ranks are asked over the control pipe instead
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(env)
    # As in any process on Linux: a fork context's semaphores (tqdm's lock is one) have no name that a killed rank
    # could leave behind, for Python to complain of when the kernel ends.
    multiprocessing.set_start_method("fork", force=True)
    import torch

    torch.set_num_threads(num_threads)

    def watch() -> None:
        with contextlib.suppress(OSError):
            while control.poll(None):
                try:
                    call = int(control.recv_bytes())
                except EOFError:
                    break
                set_stop(call)
        os.kill(os.getpid(), signal.SIGKILL)  # the kernel is gone, and so is everyone this rank could answer

    threading.Thread(target=watch, daemon=True).start()
    lock = threading.Lock()  # user code may print from threads

    def emit(message: Message) -> None:
        with lock:
            messages.send(message)

    with contextlib.suppress(EOFError):  # the kernel gave up in the middle of starting this rank
        while True:  # one persistent thread for all user code: OpenMP's settings and CUDA's context are per thread
            execute(messages.recv_bytes(), emit)


def connect(rank: int, world_size: int, device: str, store: Store, gpu: int = 0) -> None:
    """Join the ranks' process group: gloo for CPU tensors, NCCL beside it for CUDA ones. Runs on each rank.

    Args:
        store: where the ranks find each other.
        gpu: the index of this rank's GPU among those it sees.

    Raises:
        RuntimeError: this process already belongs to a group of several processes.
    """
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(gpu)
    if dist.is_initialized():
        if dist.get_world_size() != world_size:
            raise RuntimeError(
                f"this process already belongs to a process group of {dist.get_world_size()} (torchrun?); start the "
                "notebook kernel outside it."
            )
        return
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=30))
