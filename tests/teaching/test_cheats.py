"""None of these passes, and each is told something true: answers that attack the check itself."""

import pickle
import re

import pytest

from minitron.launch.messages import read_bytes, read_message
from teaching import graders
from teaching.exercises import known
from tests.tiers import tiered

REACHES = "teaching/graders", "solutions"  # by name: for tools/affected.py

PLAN = "def plan_batch(tokens_per_step, sequence_length, num_ranks, largest_micro_batch):\n"
RATE = "def learning_rate(step, peak, minimum, warmup_steps, total_steps):\n"
GRADIENTS = "def accumulate_gradients(model, micro_batches):\n"
AVERAGE = "def average_gradients(model, group):\n"
PACKAGE_RATE = "learning_rate(step, peak, minimum, warmup_steps, total_steps)"

# Each case: the exercise, the learner's file, and what must be said of it.
CHEATS = {
    # the judge and its words
    "imports the graders": (
        "1.4",
        f"import teaching.graders as g\ng.expect = print\n{PLAN}    return 0, 0",
        "teaching.graders is imported",
    ),
    "imports the graders in the function": (
        "1.4",
        f"{PLAN}    from teaching import graders\n    return 0, 0",
        "teaching is imported",
    ),
    "replaces expect where it is loaded": (
        "1.4",
        f"import sys\nsys.modules['teaching.graders'].expect = print\n{PLAN}    return 0, 0",
        "teaching.graders.expect is replaced",
    ),
    "replaces a mistake's class": (
        "1.4",
        "import sys\nsys.modules['teaching.graders.verdicts'].Mistake = OSError\n"
        f"{PLAN}    return 0, 0",
        "Mistake is replaced",
    ),
    "replaces what watches": (
        "1.1",
        "import sys\ng = sys.modules['teaching.graders.guard'].Guard\n"
        f"g._offense = lambda *a: None\n{GRADIENTS}    return 0.0",
        "Guard._offense is replaced",
    ),
    "replaces torch.allclose": (
        "1.1",
        f"import torch\ntorch.allclose = lambda *a, **k: True\n{GRADIENTS}    return 0.0",
        "torch.allclose is replaced",
    ),
    "replaces a method of tensors": (
        "1.1",
        f"import torch\n{GRADIENTS}    torch.Tensor.abs = lambda x: x * 0\n    return 0.0",
        "Tensor.abs is replaced",
    ),
    "replaces a built-in function": (
        "1.1",
        f"import builtins\n{GRADIENTS}    builtins.sorted = lambda x: []\n    return 0.0",
        "builtins.sorted is replaced",
    ),
    "replaces the ledger on a rank": (
        "4.1",
        "from minitron.measure.ledger import Ledger\n"
        f"{AVERAGE}    Ledger.__exit__ = lambda *a: None",
        "Ledger.__exit__ is replaced",
    ),
    "replaces the wire on a rank": (
        "4.1",
        f"import sys\n{AVERAGE}    ranks = sys.modules['teaching.graders.ranks']\n"
        "    ranks.Wire.__enter__ = lambda self: self",
        "Wire.__enter__ is replaced",
    ),
    "changes a function's code": (
        "1.1",
        f"import torch\n{GRADIENTS}    f = torch.nn.functional.cross_entropy\n"
        "    setattr(f, '__co' + 'de__', (lambda: 0).__getattribute__('__co' + 'de__'))",
        "changes a function's code",
    ),
    # objects that are something else
    "equals everything": (
        "1.4",
        "class Any(tuple):\n    __eq__ = lambda *a: True\n    __hash__ = None\n"
        f"{PLAN}    return Any((1, 1))",
        "an object of type Any",
    ),
    "a float that is always close": (
        "1.2",
        f"class Close(float):\n    __sub__ = lambda *a: 0.0\n{RATE}    return Close()",
        "an object of type Close",
    ),
    "a tensor of its own": (
        "1.1",
        "import torch\nclass Mine(torch.Tensor):\n    pass\n"
        f"{GRADIENTS}    return torch.zeros(()).as_subclass(Mine)",
        "an object of type Mine",
    ),
    "a nested object": (
        "1.4",
        f"class Own(int):\n    pass\n{PLAN}    return Own(1), 1",
        "an object of type Own",
    ),
    "code in a pickle": (
        "1.4",
        "class Evil:\n    def __reduce__(self):\n        return print, ('run',)\n"
        f"{PLAN}    return Evil()",
        "an object of type Evil",
    ),
    "nested without end": (
        "1.4",
        f"{PLAN}    x = []\n    x.append(x)\n    return x",
        "nested more than",
    ),
    "a number of many digits": ("1.4", f"{PLAN}    return 10 ** 5000, 1", "cannot be written"),
    # the end of the process
    "exit": ("1.4", f"import sys\n{PLAN}    sys.exit(0)", "SystemExit"),
    "exit at import": ("1.4", f"import sys\nsys.exit(0)\n{PLAN}    return 0, 0", "SystemExit"),
    "os._exit": ("1.4", f"import os\n{PLAN}    os._exit(0)", r"ended \(exit code 0\) before"),
    "os._exit on a rank": ("4.1", f"import os\n{AVERAGE}    os._exit(0)", "exited with code 0"),
    "kills itself": ("1.4", f"import os\n{PLAN}    os.kill(os.getpid(), 9)", "sends a signal"),
    "a keyboard interrupt": (
        "1.4",
        f"{PLAN}    raise KeyboardInterrupt",
        "your code raised KeyboardInterrupt",
    ),
    "a breakpoint": ("1.4", f"{PLAN}    breakpoint()", r"breakpoint\(\) is called"),
    "a way out later": (
        "1.4",
        f"import atexit, os\natexit.register(os._exit, 0)\n{PLAN}    return 0, 0",
        "trains on 0 tokens",
    ),
    "a thread": (
        "1.2",
        "from concurrent.futures import ThreadPoolExecutor as Pool\n"
        "from minitron.step import learning_rate as ours\n"
        f"{RATE}    return Pool().submit(ours, {PACKAGE_RATE.split('(')[1]}.result()",
        "learning_rate of minitron is called",
    ),
    "a thread that stays": (
        "1.4",
        f"import threading, time\n{PLAN}    threading.Thread(target=time.sleep, "
        "args=(99,)).start()\n    return 0, 0",
        "trains on 0 tokens",
    ),
    # behind the scenes
    "walks the stack": ("1.1", f"import sys\n{GRADIENTS}    sys._getframe(1)", "_getframe"),
    "walks the stack by inspect": (
        "1.1",
        f"import inspect\n{GRADIENTS}    inspect.currentframe()",
        "sys._getframe",
    ),
    "walks a traceback": (
        "1.1",
        f"{GRADIENTS}    try:\n        1 / 0\n    except ArithmeticError as error:\n"
        "        return error.__traceback__.tb_frame.f_back",
        "f_back, tb_frame",
    ),
    "looks for objects": ("1.1", f"import gc\n{GRADIENTS}    gc.get_objects()", "all objects"),
    "looks for referrers": (
        "1.1",
        f"import gc\n{GRADIENTS}    gc.get_referrers(model)",
        "all objects",
    ),
    "traces": ("1.4", f"import sys\n{PLAN}    sys.settrace(print)", "sys.settrace"),
    "profiles": ("1.4", f"import sys\n{PLAN}    sys.setprofile(print)", "sys.setprofile"),
    "audits": (
        "1.4",
        f"import sys\n{PLAN}    sys.addaudithook(print)\n    return 0, 0",
        "sys.addaudithook",
    ),
    "C by ctypes": ("1.4", f"import ctypes\n{PLAN}    return 0, 0", "ctypes is imported"),
    # files and processes
    "reads the solution": (
        "1.4",
        f"{PLAN}    open('{{root}}/solutions/ch01_single_gpu.py').read()",
        "reads ",
    ),
    "reads it by pathlib": (
        "1.4",
        "from pathlib import Path\n"
        f"{PLAN}    Path('{{root}}/solutions/ch01_single_gpu.py').read_text()",
        "reads ",
    ),
    "imports the solution": (
        "1.4",
        "import importlib.util as u\n"
        "spec = u.spec_from_file_location('s', '{root}/solutions/ch01_single_gpu.py')\n"
        "module = u.module_from_spec(spec)\nspec.loader.exec_module(module)\n"
        "plan_batch = module.plan_batch",
        "reads ",
    ),
    "imports the wrong answers": (
        "1.4",
        f"import tests.exercises.mutants.ch01_single_gpu\n{PLAN}    return 0, 0",
        "tests.exercises.mutants.ch01_single_gpu is imported",
    ),
    "writes a verdict": (
        "1.4",
        f"{PLAN}    open('verdict.json', 'w').write('passed')",
        "writes to",
    ),
    "writes a record": (
        "1.4",
        f"import os\n{PLAN}    os.mkdir('{{root}}/.minitron')",
        "changes files",
    ),
    "runs a program": ("1.4", f"import os\n{PLAN}    os.system('true')", "starts a process"),
    "forks": ("1.4", f"import os\n{PLAN}    os.fork()", "starts a process"),
    "runs text": ("1.4", f"{PLAN}    return eval('(0, 0)')", "runs text as code"),
    # the package's own answer
    "calls the package's": (
        "1.2",
        f"from minitron import step as s\n{RATE}    return s.{PACKAGE_RATE}",
        "learning_rate of minitron is called",
    ),
    "is the package's": (
        "1.2",
        "from minitron.step import learning_rate",
        "the package's own learning_rate",
    ),
    "a partial of the package's": (
        "1.2",
        "from functools import partial\nfrom minitron import step\n"
        "learning_rate = partial(step.learning_rate)",
        "functools.partial",
    ),
    "calls it through another module": (
        "1.2",
        f"import minitron.train as t\n{RATE}    return t.step.{PACKAGE_RATE}\n"
        "import minitron.step\nt.step = minitron.step",
        "learning_rate of minitron is called",
    ),
    "calls it and hides the refusal": (
        "1.2",
        f"from minitron import step as s\n{RATE}    try:\n        return s.{PACKAGE_RATE}\n"
        "    except Exception:\n        return 1.0",
        "learning_rate of minitron is called",
    ),
    "lets map call it": (
        "1.2",
        f"from minitron import step as s\n{RATE}    return next(map(s.learning_rate, [step],"
        " [peak], [minimum], [warmup_steps], [total_steps]))",
        "learning_rate of minitron is called",
    ),
    "swaps itself in": (
        "1.2",
        f"from teaching.exercises import use\n{RATE}    return 0.0",
        "teaching.exercises is imported",
    ),
    "calls it on a rank": (
        "4.1",
        "from minitron.parallel.data import ddp as d\n"
        f"{AVERAGE}    d.average_gradients(model, group)",
        "average_gradients of minitron",
    ),
    "runs the package's module again": (
        "1.2",
        "import importlib\nimport minitron.step as s\n"
        f"{RATE}    importlib.reload(s)\n    return s.{PACKAGE_RATE}",
        "step.py of minitron again",
    ),
    "runs it under another name": (
        "1.2",
        "import importlib.util as u\nimport minitron.step as s\n"
        f"{RATE}    spec = u.spec_from_file_location('other', s.__file__)\n"
        "    module = u.module_from_spec(spec)\n    spec.loader.exec_module(module)\n"
        f"    return module.{PACKAGE_RATE}",
        "step.py of minitron again",
    ),
    "calls it on ranks of its own": (
        "1.2",
        "from minitron.launch import run\n"
        f"from minitron.step import learning_rate as o\n{RATE}"
        f"    sizes = {PACKAGE_RATE.split('rate')[1]}\n"
        "    return run(lambda group: o(*sizes), 1)[0]",
        "a process is started|changes files",
    ),
    "calls it in a process of its own": (
        "1.2",
        "import torch.multiprocessing as m\nfrom minitron.step import learning_rate as o\n"
        f"{RATE}    pool = m.get_context('spawn').Pool(1)\n"
        f"    return pool.apply(o, {PACKAGE_RATE.split('rate')[1]})",
        "starts a process|a process",
    ),
    "puts a trial of its own in the place of ours": (
        "1.1",
        "import sys, types\nname = 'teaching.graders.ch01_accumulation'\n"
        "sys.modules[name] = types.SimpleNamespace(trial=None)\n"
        f"{GRADIENTS}    return 0.0",
        "uses teaching.graders.ch01_accumulation",
    ),
    "looks behind in a helper": (
        "1.4",
        f"def helper(error):\n    return error.tb_frame\n{PLAN}    return 0, 0",
        "tb_frame",
    ),
    # what it was given
    "changes the weights": (
        "1.1",
        f"{GRADIENTS}    for p in model.parameters():\n        p.data.zero_()\n    return 0.0",
        "not yet",
    ),
}


@pytest.mark.parametrize(("exercise", "text", "says"), tiered(CHEATS.values(), 8), ids=CHEATS)
def test_a_cheat_is_told(tmp_path, exercise, text, says):
    exercise = known()[exercise]
    for folder in ("solutions", "exercises"):
        (tmp_path / folder).mkdir()
    solution = tmp_path / exercise.solution_file
    solution.write_text(f"{PLAN}    return 0, 0")
    path = tmp_path / exercise.file
    path.write_text(text.replace("{root}", str(tmp_path)) + "\n")
    before = sorted(tmp_path.rglob("*.*"))

    verdict = graders.grade_file(exercise, path)
    assert verdict.state == "failed"
    if says != "not yet":
        assert re.search(says, f"{verdict.seen}\n{verdict.likely}")
    assert sorted(tmp_path.rglob("*.*")) == before


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return exec, ("raise SystemError('it ran')",)


@pytest.mark.parametrize("read", [read_message, read_bytes, graders.plain.decode])
def test_what_comes_from_a_bench_runs_nothing(read):
    with pytest.raises((pickle.UnpicklingError, graders.plain.NotPlain)):
        read(pickle.dumps(Evil()))
