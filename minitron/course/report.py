"""What a finished run tells its owner: a sample, how good it is, where it lies, what comes next."""

import textwrap

from minitron.corpus.folder import read_corpus_info
from minitron.corpus.stories import grammatical_share
from minitron.course import figures
from minitron.measure.metrics import read_metrics
from minitron.run import Run


def report(run: Run) -> None:
    """Print the closing report of a run and draw its loss curve; both stay in the run's folder."""
    info = read_corpus_info(run.config.data.path)
    rows = read_metrics(run.folder / "metrics.jsonl")
    val_loss = [row["val_loss"] for row in rows if "val_loss" in row][-1]
    floor = None
    if info["kind"] == "stories":
        floor = window_entropy(info, run.config.data.sequence_length)

    lines = describe_stories(run) if info["kind"] == "stories" else describe_text(run)
    lines.append(f"validation loss      {val_loss:.4f} nats per token")
    if floor is not None:
        lines.append(f"lowest possible      {floor:.4f} (the grammar's entropy, seen through "
                     f"{run.config.data.sequence_length} tokens)")
    curve = run.folder / "loss_curve.png"
    figures.save(figures.loss_curve(rows, floor), curve)
    text = "\n".join(lines)
    (run.folder / "report.txt").write_text(text + "\n")

    print(f"\n{text}\nloss curve           {curve}\nrun                  {run.folder}"
          f"\n\n{next_steps(info['kind'], run)}")


def describe_stories(run: Run) -> list[str]:
    """Let the model tell 64 stories; the grammar judges every complete sentence and story."""
    stories = run.sample(num_texts=64, num_tokens=120)
    sentences, whole = grammatical_share(*stories)
    first = stories[0].split("<end>")[0]
    return [
        "A story by your model:\n",
        textwrap.fill(" ".join(first.split()), 88, initial_indent="  ", subsequent_indent="  "),
        "",
        f"grammatical          {100 * sentences:.1f} % of the sentences in 64 stories",
        f"consistent           {100 * whole:.1f} % of the stories (one hero, one thing, one place "
        "all through)",
    ]


def describe_text(run: Run) -> list[str]:
    samples = run.sample(num_texts=1, num_tokens=200)
    if not samples:
        return []
    return ["A text by your model:\n", textwrap.indent(samples[0], "  "), ""]


def window_entropy(info: dict, sequence_length: int) -> float:
    """The floor for this sequence length, or the nearest longer one that the corpus knows."""
    known = {int(length): entropy for length, entropy in info["entropy_in_window"].items()}
    longer = [length for length in sorted(known) if length >= sequence_length]
    return known[longer[0]] if longer else info["entropy_per_token"]


def next_steps(kind: str, run: Run) -> str:
    """What to type next, for this kind of corpus."""
    if kind == "stories":
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
