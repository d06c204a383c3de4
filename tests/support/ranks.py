"""Real ranks for tests: one process each, connected by Gloo over loopback.

:func:`run_ranks` calls a function of a test file in every rank and reports how each rank ended. Importing torch takes
seconds, so it is done once, in a *template* (:mod:`rank_processes`): a new interpreter that imports, starts no thread,
and forks a process for every rank. Processes that run tests side by side share a template. The ranks of a call that
ended well wait in a pool for the next one. With ``fresh=True`` ranks are new and exit by themselves, for tests of how
they end; or they are killed, which is quicker, because Python takes a third of a second to forget torch. A call always
ends within its timeout and leaves no process running.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import IO, Any

START_S = 180.0  # limit for importing torch on a busy machine; not a part of any test's own timeout
_PROCESSES = Path(__file__).with_name("rank_processes.py")
_OUTPUT_CHARS = 4000
QUESTION, ANSWER = struct.Struct("<qq"), struct.Struct("<q")
FORK, END = 1, 2  # questions to the template
POOL_THREADS = 40  # a rank with more has groups that torch has kept, whose loops take time: it leaves the pool
RUNNING = 1000  # the answer, not an exit code, that a process has not ended


@dataclass(frozen=True)
class Outcome:
    """The way a rank ended.

    Attributes:
        value: the function's result.
        error_type: name of the exception's type; ``"ProcessDied"`` if the process ended without an answer,
            ``"StillRunning"`` if it had to be killed, ``"ThreadsLeft"`` if the function left threads behind; ``None``
            if the function returned.
        error_text: the exception's text.
        exit_code: exit code of the process, negative for a signal; ``None`` if the process went back to the pool, or
            was killed after a good answer because another rank failed.
            Without ``fresh=True``, or without ``exits``, a process that has answered is killed, so its exit code means
            nothing.
        output: the traceback, and the end of the process's output.
        issued: on the simulated device, the communicators of the rank's collectives, in order.
    """

    value: Any = None
    error_type: str | None = None
    error_text: str = ""
    exit_code: int | None = None
    output: str = ""
    issued: Sequence[str] = ()


@dataclass(frozen=True)
class Device:
    """The device of the ranks' tensors, unless a test names another one.

    Attributes:
        type: ``"cpu"``, or ``"sim"`` for the simulated device, with its backend of collectives.
        seed: if given, the device does its work late, with delays drawn by this seed.
    """

    type: str = "cpu"
    seed: int | None = None


CPU = Device()
_device = [CPU]


@contextlib.contextmanager
def ranks_on(device: Device) -> Iterator[None]:
    """A context in which ranks are on a device."""
    _device.append(device)
    try:
        yield
    finally:
        _device.pop()


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    group_timeout_s: float = 60.0,
    fresh: bool = False,
    exits: bool = True,
    wait_for: Collection[int] | None = None,
) -> list[Outcome]:
    """Call ``function(*args)`` in ``world_size`` processes with an initialised default group; one outcome per rank.

    Args:
        world_size: number of ranks.
        function: a function at a module's top level; it learns its rank from ``torch.distributed.get_rank()``.
        args: arguments that can be pickled, like the function's result.
        timeout_s: seconds after which processes that still run are killed.
        group_timeout_s: timeout of the process group in seconds.
        fresh: whether to start new processes, which no other call gets.
        exits: whether new processes exit by themselves, so that the outcomes have their exit codes; otherwise they are
            killed when they have answered.
        wait_for: ranks to wait for, by default all; the others are killed when these have ended.

    Returns:
        The outcomes by rank.
    """
    awaited = set(range(world_size) if wait_for is None else wait_for)
    module = sys.modules[function.__module__]
    workers: list[_Worker] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            device = _device[-1]
            idle = _idle.setdefault((device.type, device.seed is not None), [])
            while len(workers) < world_size:
                workers.append(idle.pop() if idle and not fresh else _Worker())
            for rank, worker in enumerate(workers):
                where = (module.__name__, module.__file__, function.__qualname__)
                call = args, rank, world_size, str(Path(folder, "store")), group_timeout_s, device
                worker.call(where, call, not fresh)
            deadline = time.monotonic() + timeout_s
            answers = _answers(workers, awaited, deadline)
            # A thread of Gloo may spin for ever when the peers of its connections are gone, so nobody who has seen a
            # failure goes back to the pool.
            all_well = not fresh and all(answer is not None and answer.error_type is None for answer in answers)
            outcomes = []
            for worker, answer in zip(workers, answers, strict=True):
                exit_code = None
                if all_well and worker.threads() <= POOL_THREADS:
                    idle.append(worker)
                elif all_well:
                    worker.kill()
                elif fresh or answer is None or answer.error_type is not None:
                    ends_by_itself = answer is not None and ((fresh and exits) or answer.error_type == "ProcessDied")
                    exit_code = worker.end(deadline if ends_by_itself else 0.0)
                outcomes.append(_outcome(answer, exit_code, worker))
            if all(outcome.error_type is None for outcome in outcomes):
                from harness.simulated_device.launch_order import first_difference

                different = first_difference([outcome.issued for outcome in outcomes])
                assert not different, f"collectives are issued in other orders: {different}"
            return outcomes
        finally:
            for worker in workers:
                if worker not in idle:
                    worker.kill()


def values_of(outcomes: list[Outcome]) -> list[Any]:
    """Results of the ranks' functions.

    Raises:
        AssertionError: a rank failed; the message has the errors of all ranks.
    """
    if any(outcome.error_type is not None for outcome in outcomes):
        reports = [
            f"--- rank {rank}: {outcome.error_type or 'returned'} (exit code {outcome.exit_code}) "
            f"{outcome.error_text}\n{outcome.output}"
            for rank, outcome in enumerate(outcomes)
        ]
        raise AssertionError("a rank failed\n" + "\n".join(reports))
    return [outcome.value for outcome in outcomes]


def _answers(workers: list[_Worker], awaited: set[int], deadline: float) -> list[Outcome | None]:
    """Answers by rank, ``None`` for ranks without an answer when all awaited ranks have ended or time is up."""
    answers: list[Outcome | None] = [None] * len(workers)
    waiting: dict[Any, int] = {worker.connection: rank for rank, worker in enumerate(workers)}
    while awaited & set(waiting.values()):
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting.pop(connection)
            answers[rank] = workers[rank].receive()
    return answers


def _outcome(answer: Outcome | None, exit_code: int | None, worker: _Worker) -> Outcome:
    if answer is None:
        answer = Outcome(error_type="StillRunning", error_text="killed: it had not ended in time")
    output = "" if answer.error_type is None else answer.output + worker.written()
    return replace(answer, exit_code=exit_code, output=output)


class _Worker:
    """The test's handle of a process that calls functions."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in kill
        self._exit_code: int | None = None
        self._last_call = "its start"
        self._pid = _template().fork(theirs.fileno(), self._log.fileno())
        theirs.close()

    def call(self, where: tuple[str, str | None, str], call: tuple[Any, ...], stay: bool) -> None:
        """Send a call to the process.

        Raises:
            AssertionError: the process has died since its last answer, because of that earlier call.
        """
        try:
            for part in (where, call, stay):
                self.connection.send_bytes(pickle.dumps(part))  # not send(): torch would put tensors in shared memory
        except BrokenPipeError:
            raise AssertionError(f"a rank died after {self._last_call}\n{self.written()}") from None
        self._last_call = where[2]

    def receive(self) -> Outcome:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return Outcome(error_type="ProcessDied", error_text="the process ended without an answer")

    def threads(self) -> int:
        """The number of threads of the process."""
        return len(os.listdir(f"/proc/{self._pid}/task"))

    def written(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-_OUTPUT_CHARS:]

    def end(self, deadline: float) -> int:
        """Let the process exit by itself, or kill it at the deadline; returns its exit code."""
        while self._exit_code is None:
            if time.monotonic() >= deadline:
                self._signal()
            answer = _template().exit_code_of(self._pid)
            if answer == RUNNING:
                time.sleep(0.005)
            else:
                self._exit_code = answer
        return self._exit_code

    def kill(self) -> None:
        self.end(0.0)
        self.connection.close()
        self._log.close()

    def _signal(self) -> None:
        for kill in (os.killpg, os.kill):  # os.kill: the process may not have created its group yet
            with contextlib.suppress(ProcessLookupError):
                kill(self._pid, signal.SIGKILL)


def start_template() -> str:
    """Start a template, which ends with this process, and return the path of its socket."""
    folder = tempfile.mkdtemp()
    path = str(Path(folder, "template"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if any(name == "lo" for _, name in socket.if_nameindex()):
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, str(_PROCESSES), str(listener.fileno())],
            stdin=subprocess.PIPE,  # its end tells the template that this process is gone
            pass_fds=[listener.fileno()],
            env=environment,
        )

    @atexit.register
    def end_template() -> None:
        close_pool()
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
        shutil.rmtree(folder)

    return path


def use_template(path: str) -> None:
    """Fork ranks from a template that another process has started."""
    _paths[:] = [path]


def template_path() -> str:
    """The path of the socket of this process's template, which is started if there is none."""
    if not _paths:
        use_template(start_template())
    return _paths[0]


class _Template:
    """The test's connection to the process that ranks are forked from."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(START_S)
        self._socket.connect(template_path())
        self._stdin, self._open = os.pipe()  # end of file tells the ranks that the test's process is gone

    def fork(self, *fds: int) -> int:
        """The process id of a new rank, which gets these files."""
        return self._ask(FORK, 0, [self._stdin, *fds])

    def exit_code_of(self, pid: int) -> int:
        """The exit code of a rank, whose processes are killed if any are left, or ``RUNNING``."""
        return self._ask(END, pid)

    def _ask(self, question: int, pid: int, fds: Collection[int] = ()) -> int:
        try:
            socket.send_fds(self._socket, [QUESTION.pack(question, pid)], list(fds))
            return ANSWER.unpack(self._socket.recv(ANSWER.size))[0]
        except BaseException:  # even KeyboardInterrupt: the answer to this question would be taken for the next one's
            self.close()
            raise

    def close(self) -> None:
        """Tell all ranks of this process to end."""
        self._socket.close()
        os.close(self._stdin)
        os.close(self._open)
        _templates.clear()


_paths: list[str] = []
_templates: list[_Template] = []
_idle: dict[tuple[str, bool], list[_Worker]] = {}  # by kind of device, and whether it is late


def _template() -> _Template:
    if not _templates:
        _templates.append(_Template())
    return _templates[0]


@atexit.register
def close_pool() -> None:
    """Kill the idle processes."""
    for worker in [worker for workers in _idle.values() for worker in workers]:
        worker.kill()
    _idle.clear()
    while _templates:
        _templates[0].close()
