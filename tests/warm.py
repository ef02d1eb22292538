"""Python processes that have imported before they start: forks of one that has imported, and has done nothing else.

To import PyTorch costs a process seconds of CPU, and the compiler that its optimizers import as many again; a fork of one
that has costs a tenth. A test that is about what processes do, and not about how Python starts, starts them by :class:`Popen`.
They are children of the process that starts them, with the sessions, process groups, pipes, signals, exit codes and command
lines that ``subprocess.Popen`` gives them. A command is run as usual if no fork can stand for it: if it is not of this Python,
or if it has other variables that Python or a library reads when it starts. Forks of one process share its hash seed, and the
number of threads of its OpenBLAS, which is 1: it may not have started any.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

#: These modules are imported, by the name of what needs them. Each set imports within a process of its own, when the first test
#: needs it.
NUMPY = ("numpy", "grpc", "commsched", "commsched.plugins.numpy", "commsched.cli.main")
TORCH = (*NUMPY, "torch", "torch._dynamo", "torch.distributed.run", "commsched.plugins.torch")
ACCELERATE = (*TORCH, "accelerate.commands.launch", "torchdata.stateful_dataloader", "commsched.plugins.accelerate")
TRANSFORMERS = (*ACCELERATE, "transformers.trainer", "commsched.plugins.transformers")
TENSORFLOW = (*NUMPY, "tensorflow", "commsched.plugins.tensorflow")
JAX = (*NUMPY, "jax", "optax", "commsched.plugins.jax")
MXNET = (*NUMPY, "mxnet", "commsched.plugins.mxnet")
LIGHTNING = (*TORCH, "lightning.pytorch", "commsched.plugins.lightning")

#: An argument in whose place a fork shows its own.
_ROOM = "." * 1000

#: MPICH's, which starts the ranks itself.
_MPIEXEC = os.path.join(os.path.dirname(sys.executable), "mpiexec")

_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNET = 0x40000000

#: Variables of these kinds are read when Python or a library starts, and a fork has not started.
_READ_AT_START = (
    *("PYTHON", "LD_", "LC_", "LANG", "OMP_", "OPENBLAS_", "MKL_", "GRPC_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "HF_"),
    *("TF_", "JAX_", "XLA_", "MXNET_", "DMLC_"),
)
_READ_LATER = ("PYTHONUNBUFFERED", "TORCH_NCCL_")

#: The commands for which a fork can stand, with a null between their words: of this Python, also in a network namespace.
_FORKABLE = re.compile(
    rf"(ip\0netns\0exec\0(?P<namespace>[^\0]+)\0)?{re.escape(sys.executable)}\0(?P<unbuffered>-u\0)?(?P<argv>(-[mc]\0|[^-]).*)",
    re.DOTALL,
)

#: The signals that a shell's ``&`` or nohup lets a command ignore.
_IGNORABLE = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


class Popen(subprocess.Popen[Any]):
    """A command of this Python, ``[python, SCRIPT or -m MODULE or -c CODE, ...]``, in a process that has imported ``imports``;
    or ``[mpiexec, "-n", RANKS, python, ...]``, whose ranks are such processes (``stand_in.py``).

    ``imports=()``: as ``subprocess.Popen``. ``nested``: the processes that it starts by ``subprocess.Popen`` are forks too.
    ``ignored``: it finds these signals of a shell ignored, and no others, also if it is no fork; None: it finds those ignored
    that this process ignores.
    """

    def __init__(
        self,
        args: Any,
        *arguments: Any,
        imports: Sequence[str] = (),
        nested: bool = False,
        ignored: Sequence[signal.Signals] | None = None,
        **options: Any,
    ) -> None:
        self._imports, self._nested, self._ignored = tuple(imports), nested, ignored
        if imports and list(args)[:2] == [_MPIEXEC, "-n"] and args[3] == sys.executable:
            args = [*args[:3], *_stand_in(self._imports, options.get("env") or os.environ), *args[4:]]
        super().__init__(args, *arguments, **options)

    def _execute_child(self, *arguments: Any) -> None:  # type: ignore[override]
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments
        environ = dict(os.environ if given["env"] is None else given["env"])
        found = _FORKABLE.fullmatch("\0".join(map(os.fspath, given["args"]))) if _can_be_forked(given) else None
        source = _source_of(self._imports, environ) if self._imports and found is not None else None
        register = _named_by(given["preexec_fn"])
        if source is None or found is None or (given["preexec_fn"] is not None and register is None):
            if self._ignored is not None:
                if given["shell"] or given["executable"]:
                    raise ValueError("the signals of such a command cannot be set")
                given["args"] = [*_with_signals(self._ignored), *given["args"]]
            super()._execute_child(*given.values())
            return
        if found["unbuffered"]:
            environ["PYTHONUNBUFFERED"] = "1"
        streams = [
            own if theirs == -1 else theirs
            for own, theirs in enumerate((given["p2cread"], given["c2pwrite"], given["errwrite"]))
        ]
        passed = sorted(given["pass_fds"])
        request = {
            "argv": found["argv"].split("\0"),
            "namespace": found["namespace"],
            "environ": environ,
            "cwd": os.fspath(given["cwd"] or os.getcwd()),
            "passed": passed,
            "new_session": given["start_new_session"],
            "ignored": [int(number) for number in (_ignored_here() if self._ignored is None else self._ignored)],
            "nested": self._nested,
        }
        try:
            self.pid = source.fork(request, [*streams, *passed], register)
        finally:
            ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[name] for name in ends))  # type: ignore[attr-defined]
        self._child_created = True


def run(command: Sequence[str], *, imports: Sequence[str] = (), nested: bool = False, **options: Any) -> Any:
    """``subprocess.run`` with the output as text, in a process that has imported ``imports``."""
    check, timeout = options.pop("check", False), options.pop("timeout", None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Popen(command, imports=imports, nested=nested, **{**pipes, **options}) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, err)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def let_benchmarks_fork(patch: pytest.MonkeyPatch, imports: Sequence[str], nested: bool = False) -> None:
    """The ranks and servers that benchmarks start have imported ``imports``."""
    started = SimpleNamespace(**{**vars(subprocess), "Popen": partial(Popen, imports=imports, nested=nested)})
    patch.setattr("bench.harness.processes.subprocess", started)


# --- the side that asks ---


#: One fork at a time: the flag by which it becomes a child of this process is this process's.
_fork_lock = threading.Lock()


class _Source:
    """The process that forks, as seen by one that asks it."""

    def __init__(
        self,
        link: socket.socket,
        process: subprocess.Popen[bytes] | None = None,
        address: str = "",
        imports: Sequence[str] = (),
    ) -> None:
        self._link = link
        self._process = process
        self.address = address
        self._imports = imports

    def close(self) -> int | None:
        """It ends; its forks do not. Returns its exit code, if this process has started it."""
        self._link.close()
        if self._process is None:
            return None
        try:
            return self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def lost(self) -> RuntimeError:
        """The error that tells of its end. No other test asks it."""
        with _sources_lock:
            for key in [key for key, source in _sources.items() if source is self]:
                del _sources[key]
        return RuntimeError(f"the process that forks after {self._imports} were imported has ended: exit code {self.close()}")

    def fork(self, request: dict[str, object], descriptors: list[int], register: Callable[[int], None] | None) -> int:
        """Returns the pid of the process, a child of this one. ``register`` is called with it before the process runs
        anything."""
        text = json.dumps(request).encode()
        go, its_go = socket.socketpair()
        with _fork_lock, go, its_go:
            _be_subreaper(True)
            try:
                self._link.sendall(len(text).to_bytes(8, "big"))
                socket.send_fds(self._link, [b"f"], [its_go.fileno(), *descriptors])
                self._link.sendall(text)
                pid = int.from_bytes(_exactly(self._link, 8), "big")
            except BaseException as error:  # no answer, or half of one: the next would be taken for that of another request
                lost = self.lost()
                if isinstance(error, (EOFError, OSError)):
                    raise lost from error
                raise
            finally:
                _be_subreaper(False)
            if pid == 0:
                raise OSError(f"the process that forks after {self._imports} were imported could not fork")
            if (parent := _parent_of(pid)) != os.getpid():
                raise OSError(f"the fork {pid} is a child of {parent} instead of {os.getpid()}")
            if register is not None:
                register(pid)
            go.sendall(b"g")
            return pid


#: The processes that fork, by what they have imported, and the variables that counted as they started. The last used is the
#: last.
_sources: dict[tuple[object, object], _Source] = {}
#: Each may have hundreds of megabytes, in each process that runs tests.
_MOST_SOURCES = 2
#: A fork that is ``nested`` has here the one of which its processes are forks, and the variables that counted.
_own: tuple[_Source, dict[str, str]] | None = None
_sources_lock = threading.Lock()


def _source_of(imports: tuple[str, ...], environ: Mapping[str, str]) -> _Source | None:
    """One whose forks are what a process would be that starts in ``environ`` and imports ``imports``, started if need be. It
    ends with this process."""
    counts = _read_at_start(environ)
    if _own is not None:
        return _own[0] if counts == _own[1] else None
    with _sources_lock:
        key = (imports, tuple(sorted(counts.items())))
        source = _sources.pop(key, None)
        is_lost = source is not None and source.has_ended()
        if source is None:
            while len(_sources) >= _MOST_SOURCES:
                _sources.pop(next(iter(_sources))).close()
            ours, theirs = socket.socketpair()
            listening = socket.socket(socket.AF_UNIX)
            listening.bind("")  # at an address that the system chooses
            listening.listen(100)
            others = {name: value for name, value in os.environ.items() if name not in _read_at_start(os.environ)}
            with theirs, listening:
                pass_fds = [theirs.fileno(), listening.fileno()]
                command = [sys.executable, "-m", "tests.warm", *map(str, pass_fds), *imports, _ROOM]
                address = listening.getsockname()[1:].decode()
                process = subprocess.Popen(
                    command, env={**others, **counts}, pass_fds=pass_fds, cwd=ROOT, start_new_session=True
                )
            source = _Source(ours, process, address, imports)
        if not is_lost:
            _sources[key] = source
    if is_lost:
        raise source.lost()
    return source


@atexit.register
def _close() -> None:
    for source in _sources.values():
        source.close()


def _stand_in(imports: tuple[str, ...], environ: Mapping[str, str]) -> list[str]:
    """The words that another program starts, in place of this Python, for a fork to run what follows."""
    source = _source_of(imports, environ)
    assert source is not None
    return [sys.executable, "-IS", os.path.join(ROOT, "tests", "stand_in.py"), source.address]


def _read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    found = {name: environ[name] for name in environ if name.startswith(_READ_AT_START) and not name.startswith(_READ_LATER)}
    found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(found.get("PYTHONPATH", "").split(os.pathsep)))
    return found


def _can_be_forked(given: Mapping[str, Any]) -> bool:
    """Whether a fork honours all that was given to ``subprocess.Popen``."""
    unset = all(given[name] is None for name in ("executable", "uid", "gid", "gids"))
    return unset and not given["shell"] and given["close_fds"] and given["umask"] < 0 and given["process_group"] < 0


def _ignored_here() -> list[signal.Signals]:
    return [number for number in _IGNORABLE if signal.getsignal(number) is signal.SIG_IGN]


def _with_signals(ignored: Sequence[signal.Signals]) -> list[str]:
    """A command that runs another with these signals ignored, and no others that a shell's command may ignore."""
    names = [number.name.removeprefix("SIG") for number in _IGNORABLE]
    words = [f"--ignore-signal={number.name.removeprefix('SIG')}" for number in ignored]
    return ["env", f"--default-signal={','.join(names)}", *words]


def _parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def _be_subreaper(yes: bool) -> None:
    """Whether processes whose parent ends become children of this one."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


def _named_by(preexec_fn: Callable[[], None] | None) -> Callable[[int], None] | None:
    """``commsched run`` lets each process tell its own number to the guard, which the launcher can do for a fork. None: it is
    not this that the process is to do first, so no fork can stand for it."""
    if preexec_fn is None:
        return None
    launching = inspect.getclosurevars(preexec_fn).nonlocals.get("self")
    return getattr(launching, "_tell_guard", None)


def _exactly(link: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := link.recv(count - len(data))):
            raise EOFError("the other end is gone")
        data += more
    return data


# --- the side that forks ---

#: The environment before anything was imported: what is in it later some import has set.
_started_with = dict(os.environ)


def _serve(link: socket.socket, listening: socket.socket | None = None) -> dict[str, Any] | None:
    """Fork for each request. Returns in each fork, with the request, and None here once nobody can ask any more."""
    for number in _IGNORABLE:
        signal.signal(number, signal.SIG_IGN)
    while True:
        if listening is not None and listening in select.select([link, listening], [], [])[0]:
            stand_in, _ = listening.accept()
            if (between := os.fork()) == 0:
                if os.fork() != 0:
                    os._exit(0)
                link.close()
                listening.close()
                return _attend(stand_in)
            os.waitpid(between, 0)
            stand_in.close()
            continue
        try:
            request, descriptors = _received(link)
        except (EOFError, ConnectionResetError):
            return None
        reader, writer = os.pipe()
        if (between := os.fork()) == 0:
            try:
                pid = os.fork()
            except OSError:
                os._exit(1)
            if pid == 0:
                os.close(reader)
                os.close(writer)
                link.close()
                if listening is not None:
                    listening.close()
                _become(request, descriptors)
                return request
            os.write(writer, pid.to_bytes(8, "big"))
            os._exit(0)
        os.waitpid(between, 0)  # its child has another parent from now on
        os.close(writer)
        answer = os.read(reader, 8) or bytes(8)  # 0: it could not fork
        for descriptor in (reader, *descriptors):
            os.close(descriptor)
        link.sendall(answer)


def _received(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    size = int.from_bytes(_exactly(link, 8), "big")
    _, descriptors, _, _ = socket.recv_fds(link, 1, 64)
    return json.loads(_exactly(link, size)), descriptors


def _attend(stand_in: socket.socket) -> dict[str, Any]:
    """Fork for a ``stand_in.py``. Returns in the fork, with the request. This process tells how the fork has ended, and ends it
    if the one for which it stands is gone."""
    request, descriptors = _received(stand_in)
    if (pid := os.fork()) == 0:
        stand_in.close()
        _become(request, descriptors)
        return request
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, stand_in], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    try:
        stand_in.sendall(status.to_bytes(8, "big"))
    except BrokenPipeError:
        pass
    os._exit(0)


def _become(request: Mapping[str, Any], descriptors: list[int]) -> None:
    """Make this fork the process that the request asks for."""
    if request["new_session"]:
        os.setsid()
    if os.read(descriptors[0], 1) != b"g":
        os._exit(1)  # who asked is gone
    targets = [0, 1, 2, *request["passed"]]
    beyond = max(*targets, *descriptors) + 1
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, beyond) for descriptor in descriptors[1:]]
    for descriptor in descriptors:
        os.close(descriptor)
    for target, descriptor in zip(targets, aside):
        os.dup2(descriptor, target, inheritable=True)
        os.close(descriptor)
    for number in _IGNORABLE:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    if request["namespace"] is not None:
        with open(f"/run/netns/{request['namespace']}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as random does itself in a fork
    os.chdir(request["cwd"])
    imports_set = {name: value for name, value in os.environ.items() if name not in _started_with}
    os.environ.clear()
    os.environ.update({**imports_set, **request["environ"]})
    _show_command([sys.executable, *request["argv"]])
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout = sys.__stdout__ = _unbuffered(1)
        sys.stderr = sys.__stderr__ = _unbuffered(2)


def _show_command(command: Sequence[str]) -> None:
    """Let the system show it as that of this process, where some tests look. It takes the place of the one that was."""
    with open("/proc/self/stat") as file:
        begin, end = map(int, file.read().rpartition(")")[2].split()[45:47])
    line = b"\0".join(map(os.fsencode, command))[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def _unbuffered(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    errors = "backslashreplace" if descriptor == 2 else "strict"
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, write_through=True)  # type: ignore[arg-type]


def _nest() -> dict[str, Any] | None:
    """Let what this process starts be forks. Returns in each of them, with its request, and None here."""
    global _own
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        request = _serve(theirs)
        if request is None:
            os._exit(0)
        return request
    theirs.close()
    _own = _Source(ours, imports=sys.argv[3:-1]), _read_at_start(os.environ)

    class Forked(Popen):
        """The modules of this process know it as ``subprocess.Popen``."""

        def __init__(self, args: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(args, *arguments, imports=("any",), **options)

    plain = subprocess.Popen
    for module in list(sys.modules.values()):
        if vars(module).get("Popen") is plain:
            module.Popen = Forked  # type: ignore[attr-defined]
    return None


#: The globals of what has run: those of a script live until the exit handlers have run.
_ran: list[dict[str, Any]] = []


def _run(argv: list[str]) -> None:
    """Run ``SCRIPT ...``, ``-m MODULE ...`` or ``-c CODE ...`` as Python does."""
    try:
        if argv[0] == "-m":
            sys.argv[:] = ["-m", *argv[2:]]
            sys.path[0] = os.getcwd()
            sys.modules.pop(argv[1], None)  # it runs anew
            _ran.append(runpy.run_module(argv[1], run_name="__main__", alter_sys=True))
        elif argv[0] == "-c":
            sys.argv[:] = ["-c", *argv[2:]]
            sys.path[0] = ""
            _ran.append({"__name__": "__main__", "__builtins__": builtins})
            exec(compile(argv[1], "<string>", "exec"), _ran[0])
        else:
            sys.argv[:] = argv
            sys.path[0] = os.path.dirname(os.path.realpath(argv[0]))
            _ran.append(runpy.run_path(argv[0], run_name="__main__"))
    except BaseException as error:  # as sys.exit() raises
        _ran.extend(frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__))
        raise


def main() -> None:
    link, listening = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    for each in (link, listening):
        each.set_inheritable(False)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # which a session sets before it imports gRPC
    threads_asked = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # it starts the others as it is imported, whoever needs them
    for name in sys.argv[3:-1]:
        importlib.import_module(name)
    del os.environ["OPENBLAS_NUM_THREADS"]
    if threads_asked is not None:
        os.environ["OPENBLAS_NUM_THREADS"] = threads_asked
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork would lack {len(threads) - 1} threads of {sys.argv[3:-1]}"
    request = _serve(link, listening)
    while request is not None and request["nested"]:
        nested = _nest()
        if nested is None:
            break
        request = nested
    if request is not None:
        _run(request["argv"])


if __name__ == "__main__":
    main()
