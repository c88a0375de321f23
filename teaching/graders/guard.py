"""What a learner's code may not do on a bench: call the package's own answer, or look behind it.

Three means. Functions of the package that an exercise is about refuse calls that come from the
learner's code. Python's audit events (PEP 578), which cannot be switched off again, refuse
processes, files, frames and traces to it. And what the graders measure with must be the same
after a trial as before.

They make a cheat known; they do not contain an attacker: same user, same machine.

The state is an object that only a bench holds, and no module: code that wants to switch it off
has to find it first.

Read in this order: Guard, then what it refuses.
"""

import builtins
import inspect
import linecache
import os
import re
import sys
import sysconfig
import tempfile
import threading
import tokenize
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType, FunctionType

import minitron
from teaching.exercises import ROOT, Exercise
from teaching.graders.answers import package_answers
from teaching.graders.instruments import Instruments
from teaching.graders.verdicts import Forbidden

PACKAGE = str(Path(minitron.__file__).parent)
COURSE = str(Path(__file__).parents[1]) + os.sep
LIBRARIES = ("<", *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib")))
"""Where the methods come from that an answer's class inherits, or that a decorator has made."""
SHOW_SOURCE = (linecache.__file__, tokenize.__file__)
DEBUGGER = os.sep + "bdb.py"
SECRETS = ("solutions", "tests", ".minitron", "teaching")
NO_IMPORT = ("teaching", "solutions", "exercises", "tests", "ctypes", "_ctypes",
             "subprocess", "multiprocessing")
NO_NAMES = {"tb_frame", "f_back", "f_locals", "f_globals", "gi_frame", "__globals__", "__code__",
            "__closure__", "__subclasses__", "__builtins__", "_getframe"}
NULL_CASES = ("minitron.parallel.interface", "minitron.parallel.one_device")
"""Where an answer's class may inherit from: what is asked of every technique, and does nothing."""
JUDGES = re.compile(r"teaching\.graders\.ch\d\d")  # modules with right answers in them
STARTS_PROCESSES = ("multiprocessing.process:BaseProcess.start",
                    "multiprocessing.util:spawnv_passfds")
BY_ANYONE = {
    "subprocess.Popen": "starts a process", "os.system": "starts a process",
    "os.fork": "starts a process", "os.forkpty": "starts a process",
    "os.exec": "starts a program", "os.posix_spawn": "starts a process",
    "os.spawn": "starts a process", "pty.spawn": "starts a process",
    "os.kill": "sends a signal",
    "signal.pthread_kill": "sends a signal", "gc.get_objects": "looks through all objects",
    "gc.get_referrers": "looks through all objects", "sys.settrace": "traces the grader",
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
    "gc.get_referents": "looks through all objects",  # a grader does, for what an answer keeps
    "sys._getframe": "looks at the grader's variables", "exec": "runs text as code",
    "compile": "runs text as code", "marshal.loads": "runs data as code",
    "code.__new__": "builds code", "function.__new__": "builds code",
    "object.__setattr__": "changes a function's code", "ctypes.dlopen": "calls C",
    "ctypes.dlsym": "calls C", "ctypes.cdata": "calls C", "ctypes.string_at": "calls C",
    "ctypes.addressof": "calls C", "ctypes.call_function": "calls C",
}
"""Those that are refused where the learner's code asks itself."""
WATCHED = {*BY_ANYONE, *DIRECTLY, "open"}


class Guard:
    """Watches over one learner's file in this process."""

    def __init__(self, exercise: Exercise, path: Path):
        self.files = {str(path)}
        roots = {ROOT, path.resolve().parents[1]}
        self.secrets = ("/proc/", *(f"{root / name}{os.sep}" for root in roots for name in SECRETS))
        self.violations: list[str] = []
        self.state = threading.local()
        self.guarded_files: set[str] = set()
        # A test that grades the package itself hands in a file of the package.
        self.grades_package = str(path).startswith(PACKAGE + os.sep)
        for name in () if self.grades_package else package_answers(exercise):
            self.forbid_calls(name, f"{name.partition(':')[2]} of minitron is called")
        for name in STARTS_PROCESSES:
            self.forbid_calls(name, "a process is started")
        self.instruments = Instruments()  # as they are now, with what is forbidden in front
        # Or a first import, and a first temporary file, would be taken for the learner's writing.
        sys.dont_write_bytecode = True
        tempfile.gettempdir()
        sys.addaudithook(self._audit)

    def refuse(self, what: str) -> None:
        """Raise Forbidden; the verdict will say so even if the learner's code catches it."""
        self.violations.append(what)
        raise Forbidden(what)

    def expect_untold(self) -> None:
        """Raise Forbidden for what was refused before."""
        if self.violations:
            raise Forbidden(self.violations[0])

    def expect_intact(self) -> None:
        """Raise Forbidden if the learner's code has changed what its work is measured with."""
        self.expect_untold()
        name = self.instruments.replaced()
        if name is not None:
            self.refuse(f"{name} is replaced")

    # What is looked at before anything runs

    def builtins(self) -> dict:
        """The built-in functions for the learner's file: some imports and breakpoint() are told."""
        def guarded_import(name, globals=None, locals=None, fromlist=(), level=0):
            for module in [name, *(f"{name}.{part}" for part in fromlist or ())]:
                if module.startswith("exercises"):
                    self.refuse(f"{module} is imported, but a file is graded alone: copy what you "
                                "need into it")
                if f"{module}.".startswith(tuple(f"{refused}." for refused in NO_IMPORT)):
                    self.refuse(f"{module} is imported")
            return builtins.__import__(name, globals, locals, fromlist, level)

        def no_breakpoint(*args, **kwargs):
            self.refuse("breakpoint() is called, and a check has no terminal")

        return vars(builtins) | {"__import__": guarded_import, "breakpoint": no_breakpoint}

    def look_at(self, functions: dict[str, Callable]) -> None:
        """Refuse an answer that is the package's own, or that was not written here."""
        for name, answer in functions.items():
            for function in self._written(name, answer):
                file = function.__code__.co_filename
                if file.startswith(LIBRARIES):
                    continue
                in_package = file.startswith(PACKAGE + os.sep)
                if in_package and not self.grades_package:
                    self.refuse(f"{name} is the package's own {function.__qualname__}")
                if not in_package:
                    self.files.add(file)
                self.look_at_names(name, function.__code__)

    def look_at_names(self, name: str, code: CodeType) -> None:
        """Refuse code that uses what leads behind the check."""
        hidden = NO_NAMES & set(_names(code)) | set(filter(JUDGES.match, _strings(code)))
        if hidden:
            self.refuse(f"{name} uses {', '.join(sorted(hidden))}, which looks behind the check")

    def _written(self, name: str, answer: Callable) -> list[FunctionType]:
        """The functions that an answer consists of: itself, or the methods of a class."""
        function = inspect.unwrap(answer)
        if isinstance(function, FunctionType):
            return [function]
        if not isinstance(function, type):
            self.refuse(f"{name} is a {type(answer).__module__}.{type(answer).__name__}, not a "
                        "function or class: write it with def or class")
        return [method for cls in function.__mro__
                if cls.__module__.split(".")[0] not in ("builtins", "torch")
                and cls.__module__ not in NULL_CASES
                for method in _functions_of(cls)]

    # The package's own answer

    def forbid_calls(self, name: str, what: str) -> None:
        """Make a function or class, "module:name", refuse the learner's calls; `what` is told."""
        module, _, path = name.partition(":")
        target = import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
        target = inspect.unwrap(target)
        functions = [target] if isinstance(target, FunctionType) else _functions_of(target)
        assert functions, name
        for function in functions:
            self.guarded_files.add(function.__code__.co_filename)
            _put_in_front(function, self._gate(_copy(function), what))

    def _gate(self, original: Callable, what: str) -> Callable:
        def enter(args: tuple, kwargs: dict):
            in_thread = threading.current_thread() is not threading.main_thread()
            if in_thread or any(map(self._is_learners, self._stack())):
                self.refuse(what)
            return original(*args, **kwargs)
        return enter

    def _stack(self) -> list[FrameType]:
        was_looking = getattr(self.state, "looking", False)
        self.state.looking = True
        frame, frames = sys._getframe(2), []
        self.state.looking = was_looking
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        return frames

    def _is_learners(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename in self.files or \
            str(frame.f_globals.get("__name__", "")).startswith("exercises.")

    # Audit events

    def _audit(self, event: str, args: tuple) -> None:
        if event not in WATCHED or getattr(self.state, "looking", False):
            return
        self.state.looking = True
        try:
            what = self._offense(event, args, self._stack())
        finally:
            self.state.looking = False
        if what:
            self.refuse(what)

    def _offense(self, event: str, args: tuple, stack: list[FrameType]) -> str | None:
        own = [self._is_learners(frame) for frame in stack]
        if True not in own:
            return None
        line = stack[own.index(True)].f_lineno
        if event == "exec" and args[0].co_filename in self.guarded_files:
            return f"line {line} runs {os.path.basename(args[0].co_filename)} of minitron again"
        if any(frame.f_code.co_filename.endswith(DEBUGGER) for frame in stack):
            return f"line {line} starts a debugger, and a check has no terminal"
        if event in BY_ANYONE:
            return f"line {line} {BY_ANYONE[event]} ({event})"
        if event in DIRECTLY:
            asks = [mine for frame, mine in zip(stack, own, strict=True)
                    if frame.f_code.co_filename != inspect.__file__]
            return f"line {line} {DIRECTLY[event]} ({event})" if asks[0] else None
        if not isinstance(args[0], str | bytes | os.PathLike):
            return None
        file = os.path.abspath(os.fsdecode(args[0]))
        if event == "open" and _writes(args) and file != os.devnull:
            return f"line {line} writes to {file}"
        if file.startswith(COURSE) and stack[0].f_code.co_filename in SHOW_SOURCE:
            return None  # a warning or a traceback shows a line
        is_secret = f"{file}{os.sep}".startswith(self.secrets) and file not in self.files
        return f"line {line} reads {file}" if is_secret else None


def _functions_of(cls: type) -> list[FunctionType]:
    """The functions in a class's body, static ones and class methods too."""
    values = (inspect.unwrap(getattr(value, "__func__", value)) for value in vars(cls).values()
              if callable(getattr(value, "__func__", value)))
    return [value for value in values if isinstance(value, FunctionType)]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _strings(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _strings(constant)
        elif isinstance(constant, str):
            yield constant


def _copy(function: FunctionType) -> FunctionType:
    copy = FunctionType(function.__code__, function.__globals__, function.__name__,
                        function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _put_in_front(function: FunctionType, gate: Callable) -> None:
    # Its code is exchanged in place: every module, dict and partial that holds it is served.
    code = _in_front.__code__
    constants = tuple(gate if constant == "GATE" else constant for constant in code.co_consts)
    function.__code__ = code.replace(
        co_consts=constants, co_freevars=function.__code__.co_freevars,
        co_filename=function.__code__.co_filename, co_name=function.__name__)


def _in_front(*args, **kwargs):
    gate = "GATE"
    return gate(args, kwargs)


def _writes(args: tuple) -> bool:
    mode, flags = args[1], args[2]
    return bool(set(mode or "") & set("wax+")) or bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))
