"""What a finished run tells its owner: a sample, how good it is, where it lies, what comes next."""

import io
import json
import sys
import textwrap
from collections import Counter

from matplotlib.figure import Figure

from minitron.comm.agreement import all_gather_objects, exit_on_all_ranks
from minitron.config.file import to_dict
from minitron.corpus.stories import grammatical_share
from minitron.measure.metrics import read_metrics
from minitron.run import Run
from minitron.system import disk
from teaching import figures
from teaching.exercises import Exercise, find

NUM_STORIES, STORY_TOKENS, TEXT_TOKENS = 64, 120, 200
COMPARISON = (
    "the corpus scores 100 % and 100 %; sentences that ignore the earlier ones, 100 % and 0 %"
)
TYPICAL = (
    "about 99 % and 35 % after configs/stories.toml; from 64 stories, a share is uncertain "
    "by 6 points"
)
"""Measured on 262 stories by such a model, most of whose mistakes were in the place."""


def report(run: Run) -> None:
    """Print the closing report of a run and draw its loss curve; both stay in the run's folder.

    All ranks call it, as they write the samples together; rank 0 prints. A run that was through
    already is not asked for samples again.
    """
    saved = all_gather_objects(saved_report(run) if run.rank == 0 else None, run.group)[0]
    text = saved or new_report(run)
    with exit_on_all_ranks(run.group):
        if run.rank == 0:
            if saved is not None:
                print(
                    f"{run.folder}: all {run.step:,} steps are done; --train.steps "
                    f"{2 * run.step} --train.continuation restart would add as many. The report:"
                )
            print(
                f"\n{text}\nloss curve           {run.folder / 'loss_curve.png'}"
                f"\nrun                  {run.folder}\n\n{next_steps(run)}",
                flush=True,
            )
            keep(run, text)


def report_use(run: Run, calls: Counter) -> None:
    """Print how often a run has called the learner's functions, as `use` counts; all ranks call it.

    Warns of an exercise of which nothing was called: the run trained without it. One that was
    through already says nothing.
    """
    everyone = all_gather_objects(calls, run.group)
    if run.rank > 0 or run.step == run.first_step:
        return
    of_ranks = f" on the rank with the most calls, of {run.size}" if run.size > 1 else ""
    for number in sorted({number for number, _ in calls}):
        most = {key[1]: max(each[key] for each in everyone) for key in calls if key[0] == number}
        called = [
            f"{name} {count:,} time{'s' * (count != 1)}"
            for name, count in most.items()
            if count > 0
        ]
        if called:
            print(f"exercise {number}: the run called your {', '.join(called)}{of_ranks}")
        else:
            print(f"minitron: warning: {why_unused(find(number), run)}", file=sys.stderr)


def why_unused(exercise: Exercise, run: Run) -> str:
    """Say that a run has called none of an exercise's functions, and which one would."""
    unused = f"the run never called your {' or '.join(exercise.names)} (exercise {exercise.id})"
    if run.config.train.compile:
        return f"{unused}, except perhaps in the compiled model, where calls are not counted"
    if exercise.command is None:
        return f"{unused}: training does not need it"
    return f"{unused}; this one does: {exercise.command}"


def saved_report(run: Run) -> str | None:
    """The report of a run that has only been loaded, if there is one of this step."""
    path = run.folder / "report.txt"
    if run.step > run.first_step or not path.is_file():
        return None
    text = path.read_text(errors="replace").rstrip("\n")
    return text if steps_line(run) in text.split("\n") else None


def new_report(run: Run) -> str:
    is_stories = run.corpus_info["kind"] == "stories"
    lines = describe_stories(run) if is_stories else describe_text(run)
    lines.append(steps_line(run))
    losses = [row["val_loss"] for row in logged(run) if "val_loss" in row]
    if losses:  # a damaged log may have none
        lines.append(f"validation loss      {losses[-1]:.4f} nats per token")
    floor = lowest_loss(run)
    if floor is not None:
        lines.append(
            f"lowest possible      {floor:.4f} (the grammar's entropy, seen through "
            f"{run.config.data.sequence_length} tokens)"
        )
    return "\n".join(lines)


def keep(run: Run, text: str) -> None:
    """Write the report and the loss curve into the run's folder."""
    remedy = f"the run is saved: make room, and add --resume --run-dir {run.folder}"
    with disk.writing(run.folder, remedy):
        disk.replace(run.folder / "report.txt", f"{text}\n".encode())
        rows = logged(run)
        if any("loss" in row for row in rows):
            curve = figures.loss_curve(rows, lowest_loss(run))
            disk.replace(run.folder / "loss_curve.png", with_facts(curve, run, rows))


def with_facts(curve: Figure, run: Run, rows: list[dict]) -> bytes:
    """Encode the loss curve as PNG, with a comment that says in JSON which run it shows.

    By it a test compares README's figure with configs/stories.toml.
    """
    tables = to_dict(run.config)
    facts = {name: tables[name] for name in ("model", "data", "train")}
    facts["evaluated"] = [row["step"] for row in rows if "val_loss" in row]
    buffer = io.BytesIO()
    curve.savefig(buffer, format="png", metadata={"Software": None, "Comment": json.dumps(facts)})
    return buffer.getvalue()


def logged(run: Run) -> list[dict]:
    """The rows of the log, which rank 0 writes."""
    path = run.folder / "metrics.jsonl"
    return read_metrics(path) if path.is_file() else []


def steps_line(run: Run) -> str:
    return f"trained for          {run.step:,} steps, {run.tokens:,} tokens"


def lowest_loss(run: Run) -> float | None:
    """The entropy of the text, where it is known."""
    if run.corpus_info["kind"] != "stories":
        return None
    return window_entropy(run.corpus_info, run.config.data.sequence_length)


def describe_stories(run: Run) -> list[str]:
    """Let the model tell 64 stories; the grammar judges every complete sentence and story."""
    stories = run.sample(NUM_STORIES, STORY_TOKENS)
    if not stories:
        return []
    sentences, whole = grammatical_share(*stories)
    first = stories[0].split("<end>")[0]
    return [
        "A story by your model:\n",
        textwrap.fill(" ".join(first.split()), 88, initial_indent="  ", subsequent_indent="  "),
        "",
        f"grammatical          {100 * sentences:.1f} % of the sentences in {NUM_STORIES} stories, "
        "each judged by itself",
        f"consistent           {100 * whole:.1f} % of the stories (one hero, one thing, one place "
        "throughout)",
        f"for comparison       {COMPARISON}",
        f"typical              {TYPICAL}",
    ]


def describe_text(run: Run) -> list[str]:
    samples = run.sample(1, TEXT_TOKENS)
    if not samples:
        return []
    return ["A text by your model:\n", textwrap.indent(samples[0], "  "), ""]


def window_entropy(info: dict, sequence_length: int) -> float:
    """The floor for this sequence length, or the nearest longer one that the corpus knows."""
    known = {int(length): entropy for length, entropy in info["entropy_in_window"].items()}
    longer = [length for length in sorted(known) if length >= sequence_length]
    return known[longer[0]] if longer else info["entropy_per_token"]


def next_steps(run: Run) -> str:
    """What to type next, for this kind of corpus and of machine."""
    if run.size > 1:
        return f"Next: write it for transformers:\n  minitron export {run.folder} my-model"
    if run.corpus_info["kind"] == "stories":
        return (
            "Next: `make lab` opens chapter 1; or train on real text:\n"
            "  minitron data python\n"
            "  minitron train configs/python.toml"
        )
    return (
        "Next: a longer run, or a deeper model:\n"
        f"  minitron train configs/python.toml --data.path {run.config.data.path} "
        f"--train.steps {4 * run.config.train.steps}"
    )
