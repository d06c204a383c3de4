"""The processes that :mod:`ranks` starts: the template, run as a script, and the ranks that it forks."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import simulated_ranks
from ranks import ANSWER, FORK, QUESTION, RUNNING, Device, Outcome

_CHECKOUT = Path(__file__).parents[2]
_THREADS = "/proc/self/task"
_devices: list[Any] = []  # the device of Gloo in a running call, which has a loop

# -------------------------------------------------------------------- the template's process


def _fork_on_demand(listener: socket.socket) -> None:
    """Answer the tests' processes until the process that started the template is gone; in a rank's process, return when
    its work is done."""
    _prepare()
    tests: list[socket.socket] = []
    while True:
        for ready in select.select([sys.stdin, listener, *tests], [], [])[0]:
            if ready is sys.stdin:
                return  # nobody writes there, so this is its end
            if ready is listener:
                tests.append(listener.accept()[0])
                continue
            try:
                message, fds, _, _ = socket.recv_fds(ready, QUESTION.size, 3)
            except ConnectionResetError:  # the process has ended without reading an answer
                message, fds = b"", []
            if not message:
                ready.close()
                tests.remove(ready)
                continue
            question, pid = QUESTION.unpack(message)
            if question == FORK:
                answer = os.fork()
                if answer == 0:
                    for each in (listener, *tests):
                        each.close()
                    return _serve(*fds)
                for fd in fds:
                    os.close(fd)
            else:
                answer = _exit_code(pid)
            with contextlib.suppress(BrokenPipeError):  # other processes still need the template
                ready.sendall(ANSWER.pack(answer))


def _prepare() -> None:
    """Import once what ranks need, and start no thread."""
    gc.disable()
    import torch

    # DDP imports Dynamo; torch imports the next two, with hundreds of others, where it compiles; the modules of tests
    # import the package
    for name in (
        *("torch._dynamo", "torch._dynamo.backends.debugging", "torch._inductor.compile_fx", "torch.distributed.optim"),
        *("audits", "fuzzed_trainings", "scaled_trainings", "sharded_models", "tunings", "workloads", "pytest"),
    ):
        importlib.import_module(name)
    torch.set_num_threads(1)
    _share_loops()
    assert threading.active_count() == 1
    gc.freeze()  # garbage collection in a rank need not visit imported modules, which would copy their memory
    gc.enable()
    gc.set_threshold(10_000, 20, 20)  # it is also done less often


def _exit_code(pid: int) -> int:
    """The exit code of a rank that has ended, or ``RUNNING``."""
    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return RUNNING
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # processes that it has left; its id cannot be reused before waitpid
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _share_loops() -> None:
    """Let all groups of Gloo in a process share a loop, a thread of low priority.

    A loop wakes a hundred times a second, and spins while a message waits for its receiver, which may need the core.
    """
    from torch.distributed import ProcessGroupGloo

    make = ProcessGroupGloo.__init__

    def make_with_shared_loop(
        group: ProcessGroupGloo, store: Any, rank: int, size: int, timeout: datetime.timedelta
    ) -> None:
        if not _devices:
            threads = set(os.listdir(_THREADS))
            _devices.append(ProcessGroupGloo.create_default_device())
            for thread in set(os.listdir(_THREADS)) - threads:
                os.setpriority(os.PRIO_PROCESS, int(thread), 19)
        options = ProcessGroupGloo._Options()
        options._timeout, options._devices = timeout, _devices
        make(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = make_with_shared_loop  # type: ignore[method-assign]


# -------------------------------------------------------------------- a rank's process


def _serve(stdin: int, calls: int, log: int) -> None:
    """Answer calls until one fails, one is the last (``stay`` is false), or the test closes the connection."""
    os.setsid()  # a separate process group, which is killed as a whole
    connection = Connection(calls)
    sys.path.insert(0, str(_CHECKOUT))  # harness, bench and examples
    for stream, fd in enumerate((stdin, log, log)):
        os.dup2(fd, stream)
    os.close(stdin)
    os.close(log)
    threading.Thread(target=_exit_with_the_test, daemon=True).start()
    faulthandler.enable()
    while True:
        try:
            where = pickle.loads(connection.recv_bytes())
            function = _function(*where)
            call = pickle.loads(connection.recv_bytes())
            stay = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        outcome = _call(function, *call)
        connection.send_bytes(pickle.dumps(outcome))
        if outcome.error_type is not None or not stay:
            return  # abandons the other ranks, like a program that ends


def _exit_with_the_test() -> None:
    os.read(0, 1)
    os._exit(1)


def _function(module_name: str, path: str, qualname: str) -> Any:
    if module_name not in sys.modules:
        folder = str(Path(path).parents[module_name.count(".")])  # its neighbours
        if folder not in sys.path:
            sys.path.insert(0, folder)
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module_name])
    return getattr(sys.modules[module_name], qualname)


def _call(
    function: Callable[..., Any],
    args: Any,
    rank: int,
    world_size: int,
    store: str,
    group_timeout_s: float,
    device: Device,
) -> Outcome:
    import torch.distributed as dist

    before = set(threading.enumerate())
    try:
        if device.type == "sim":
            simulated_ranks.use(device)
        file_store = dist.FileStore(store, world_size)
        dist.init_process_group(
            "simccl" if device.type == "sim" else "gloo",
            store=file_store,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=group_timeout_s),
        )
        try:
            # a rank that ends immediately must not break connections that others are still opening
            file_store.set(f"connected/{rank}", "")
            file_store.wait([f"connected/{other}" for other in range(world_size)])
            outcome = Outcome(function(*args))
            if device.type == "sim":
                outcome = simulated_ranks.checked(outcome)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            _devices.clear()
        left = [each.name for each in threading.enumerate() if each not in before and not _is_foreign(each)]
        if left:
            return Outcome(error_type="ThreadsLeft", error_text=", ".join(left))
        pickle.dumps(outcome)
        return outcome
    except BaseException as error:  # any error is the outcome of this rank
        return Outcome(None, type(error).__name__, str(error), output=traceback.format_exc())


def _is_foreign(thread: threading.Thread) -> bool:
    """Whether a thread is one of C++ that has called Python, as autograd has for each device."""
    return isinstance(thread, threading._DummyThread)


if __name__ == "__main__":
    _fork_on_demand(socket.socket(fileno=int(sys.argv[1])))
