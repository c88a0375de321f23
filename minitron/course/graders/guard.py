"""What a learner's code may not do on a bench: call the package's own answer, or look behind it.

Three means. Functions of the package that an exercise is about refuse calls that come from the
learner's code. Python's audit events (PEP 578), which cannot be switched off again, refuse
processes, files, frames and traces to it. And what the graders measure with must be the same
after a trial as before.

They make a cheat known; they do not contain an attacker: same user, same machine.

Read in this order: set_up, look_at, forbid_calls, _audit, expect_intact.
"""

import builtins
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType

from minitron.course.exercises import ROOT, Exercise
from minitron.course.graders.answers import package_answers
from minitron.course.graders.verdicts import Forbidden

PACKAGE = str(Path(__file__).parents[2])
GRADERS = str(Path(__file__).parent)
SECRETS = ("solutions", "tests", ".minitron", "minitron/course")
NO_IMPORT = ("minitron.course", "solutions", "exercises", "tests", "ctypes", "_ctypes",
             "subprocess", "multiprocessing")
NO_NAMES = {"tb_frame", "f_back", "f_locals", "f_globals", "gi_frame", "__globals__", "__code__",
            "__closure__", "__subclasses__", "__builtins__", "_getframe"}
BY_ANYONE = {
    "subprocess.Popen": "starts a process", "os.system": "starts a process",
    "os.fork": "starts a process", "os.forkpty": "starts a process",
    "os.exec": "starts a program", "os.posix_spawn": "starts a process",
    "os.spawn": "starts a process", "pty.spawn": "starts a process",
    "_thread.start_new_thread": "starts a thread", "os.kill": "sends a signal",
    "signal.pthread_kill": "sends a signal", "gc.get_objects": "looks through all objects",
    "gc.get_referrers": "looks through all objects",
    "gc.get_referents": "looks through all objects", "sys.settrace": "traces the grader",
    "sys.setprofile": "traces the grader", "sys.addaudithook": "traces the grader",
    "sys._current_frames": "looks at the grader's variables",
    "sys.monitoring.register_callback": "traces the grader",
    "os.remove": "changes files", "os.rename": "changes files", "os.rmdir": "changes files",
    "os.mkdir": "changes files", "os.truncate": "changes files", "os.link": "changes files",
    "os.symlink": "changes files", "os.chmod": "changes files",
    "socket.connect": "opens a connection", "socket.bind": "opens a connection",
}
"""Audit events that are refused wherever the learner's code is on the stack."""
DIRECTLY = {
    "sys._getframe": "looks at the grader's variables", "exec": "runs text as code",
    "compile": "runs text as code", "marshal.loads": "runs data as code",
    "code.__new__": "builds code", "function.__new__": "builds code",
    "object.__setattr__": "changes a function's code", "ctypes.dlopen": "calls C",
    "ctypes.dlsym": "calls C", "ctypes.cdata": "calls C", "ctypes.string_at": "calls C",
    "ctypes.addressof": "calls C", "ctypes.call_function": "calls C",
}
"""Those that are refused where the learner's code asks itself."""
WATCHED = {*BY_ANYONE, *DIRECTLY, "open", "import", "os.listdir", "os.scandir"}


class _State(threading.local):
    looking = False


_state = _State()
_files: set[str] = set()
_secrets: list[str] = ["/proc/"]
_told: list[str] = []
_originals: dict[str, tuple[Callable, str]] = {}
_before: dict[tuple[str, str], tuple[object, object]] = {}
_instruments: list[ModuleType] = []


def set_up(grader: Callable, exercise: Exercise, path: Path) -> None:
    """Prepare this process for the learner's file at `path`, before it is loaded."""
    _files.add(str(path))
    _secrets.extend(str(root / name) + os.sep for root in {ROOT, path.resolve().parents[1]}
                    for name in SECRETS)
    _instruments.extend(_find_instruments())
    _before.update(_snapshot())
    for name in package_answers(exercise):
        forbid_calls(name)
    sys.addaudithook(_audit)


def look_at(functions: dict[str, Callable]) -> None:
    """Raise Forbidden for an answer that is the package's own, or none that was written."""
    for name, answer in functions.items():
        for function in _written(name, answer):
            file = function.__code__.co_filename
            if file.startswith(PACKAGE + os.sep) and not file.startswith(GRADERS):
                refuse(f"{name} is the package's own {function.__qualname__}")
            if not file.startswith(PACKAGE + os.sep):
                _files.add(file)
            hidden = NO_NAMES & set(_names(function.__code__))
            if hidden:
                refuse(f"{name} uses {', '.join(sorted(hidden))}: it looks behind the check")


def _written(name: str, answer: Callable) -> list[FunctionType]:
    """The functions that an answer consists of: itself, or the methods of a class."""
    function = inspect.unwrap(answer)
    if isinstance(function, FunctionType):
        return [function]
    if not isinstance(function, type):
        refuse(f"{name} is {type(answer).__module__}.{type(answer).__name__}, not a function "
               "written here")
    return [inspect.unwrap(method) for cls in function.__mro__
            if cls.__module__.split(".")[0] not in ("builtins", "torch")
            for value in vars(cls).values()
            if isinstance(method := getattr(value, "__func__", value), FunctionType)]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def refuse(what: str) -> None:
    """Raise Forbidden, which the verdict will say even if the learner's code catches it."""
    _told.append(what)
    raise Forbidden(what)


def guarded_builtins() -> dict:
    """The built-in functions for the learner's file: some imports and breakpoint() are told."""
    def guarded_import(name, globals=None, locals=None, fromlist=(), level=0):
        full = [name, *(f"{name}.{part}" for part in fromlist or ())]
        for module in full:
            if module.startswith(tuple(f"{n}." for n in NO_IMPORT)) or module in NO_IMPORT:
                refuse(f"{module} is imported")
        return builtins.__import__(name, globals, locals, fromlist, level)

    def no_breakpoint(*args, **kwargs):
        refuse("breakpoint() is called, and a check has no terminal")

    return vars(builtins) | {"__import__": guarded_import, "breakpoint": no_breakpoint}


# The package's own answer


def forbid_calls(name: str) -> None:
    """Make a function or class of the package, "module:name", refuse the learner's calls."""
    module, _, path = name.partition(":")
    target = import_module(module)
    for part in path.split("."):
        target = getattr(target, part)
    target = inspect.unwrap(target)
    functions = [target] if isinstance(target, FunctionType) else [
        function for value in vars(target).values()
        if isinstance(function := getattr(value, "__func__", value), FunctionType)]
    for number, function in enumerate(map(inspect.unwrap, functions)):
        _put_in_front(function, f"{name}#{number}", path)


def _put_in_front(function: FunctionType, key: str, name: str) -> None:
    # Its code is exchanged in place: every module, dict and partial that holds it is served.
    original = FunctionType(function.__code__, function.__globals__, function.__name__,
                            function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    _originals[key] = original, name
    code = _in_front.__code__
    constants = tuple(key if constant == "KEY" else constant for constant in code.co_consts)
    function.__code__ = code.replace(
        co_consts=constants, co_freevars=function.__code__.co_freevars,
        co_filename=function.__code__.co_filename, co_name=function.__name__)


def _in_front(*args, **kwargs):
    from minitron.course.graders.guard import enter
    return enter("KEY", args, kwargs)


def enter(key: str, args: tuple, kwargs: dict):
    """Call the original function, unless the learner's code is on the stack."""
    original, name = _originals[key]
    if any(map(_is_learners, _stack())):
        refuse(f"{name} of minitron is called")
    return original(*args, **kwargs)


def _stack() -> Iterator[FrameType]:
    was_looking, _state.looking = _state.looking, True
    frame = sys._getframe(2)
    _state.looking = was_looking
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_learners(frame: FrameType) -> bool:
    return frame.f_code.co_filename in _files or \
        str(frame.f_globals.get("__name__", "")).startswith("exercises.")


# Audit events


def _audit(event: str, args: tuple) -> None:
    if event not in WATCHED or _state.looking:
        return
    _state.looking = True
    try:
        what = _offence(event, args, list(_stack()))
    finally:
        _state.looking = False
    if what:
        refuse(what)


def _offence(event: str, args: tuple, stack: list[FrameType]) -> str | None:
    own = [_is_learners(frame) for frame in stack]
    if True not in own:
        return None
    line = stack[own.index(True)].f_lineno
    if event in BY_ANYONE:
        return f"line {line} {BY_ANYONE[event]} ({event})"
    if event in DIRECTLY:
        return f"line {line} {DIRECTLY[event]} ({event})" if own[0] else None
    path = args[0]
    if event == "import" or not isinstance(path, str | bytes | os.PathLike):
        return None
    file = os.path.abspath(os.fsdecode(path))
    if event == "open" and _writes(args) and "__pycache__" not in file and file != os.devnull:
        return f"line {line} writes to {file}"
    is_secret = (file + os.sep).startswith(tuple(_secrets))
    if is_secret and file not in _files and not file.endswith(".pyc"):
        return f"line {line} reads {file}"
    return None


def _writes(args: tuple) -> bool:
    mode, flags = args[1], args[2]
    return bool(set(mode or "") & set("wax+")) or bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))


# What the graders measure with


def _find_instruments() -> list[ModuleType]:
    import torch
    import torch.nn.functional

    own = ("minitron.measure", "minitron.course", "minitron.comm.rank_process")
    return [torch, torch.nn.functional, torch.autograd, torch.distributed,
            torch.distributed.distributed_c10d, builtins,
            *(module for name, module in list(sys.modules.items()) if name.startswith(own))]


def _snapshot() -> dict[tuple[str, str], tuple[object, object]]:
    """Every function and class of these modules, and of their classes, with its code."""
    import torch

    seen = {}
    for module in _instruments:
        for name, value in list(vars(module).items()):
            if callable(value):
                seen[module.__name__, name] = value, getattr(value, "__code__", None)
            if issubclass(type(value), type) and value.__module__ == module.__name__ \
                    and module.__name__.startswith("minitron."):
                seen |= _methods(value)
    return seen | _methods(torch.Tensor) | _methods(torch._C.TensorBase)


def _methods(cls: type) -> dict[tuple[str, str], tuple[object, object]]:
    return {(cls.__qualname__, name): (value, getattr(value, "__code__", None))
            for name, value in list(vars(cls).items()) if callable(value)}


def expect_intact() -> None:
    """Raise Forbidden if the learner's code has changed what its work is measured with."""
    after = _snapshot()
    for (owner, name), (value, code) in _before.items():
        now = after.get((owner, name), (None, None))
        if now[0] is not value or now[1] is not code:
            refuse(f"{owner}.{name} is replaced")
    expect_untold()


def expect_untold() -> None:
    """Raise Forbidden for what was refused before and not said, because it was caught."""
    if _told:
        raise Forbidden(_told[0])
