"""The training loop: a run, what it saves, and how it is started, stopped and resumed.

Read in this order: `Run` (what a run owns, and so what a checkpoint holds), `train`, `loop`.

    minitron train configs/stories.toml
    torchrun -m minitron.train configs/stories.toml
"""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor
from tqdm import tqdm

from minitron import checkpoint, command_line, cost
from minitron.config import Config, from_dict, load, require, to_dict
from minitron.corpus.folder import end_of_document, load_tokenizer, read_corpus_info
from minitron.dataset import TokenDataset
from minitron.measure.clock import Clock, Speed, peak_flops
from minitron.measure.metrics import MetricsLog
from minitron.model.generate import generate
from minitron.model.transformer import Transformer, initialise
from minitron.process import Interruption, pick_device, require_one_process
from minitron.step import learning_rate, low_precision, make_optimizer, summed_loss, train_step


class Run:
    """A model in training: what it owns, one step of it, and what a checkpoint holds.

    Raises ConfigError if data, model and device do not fit together.
    """

    def __init__(self, config: Config, folder: Path):
        S = config.data.sequence_length
        self.dataset = TokenDataset(config.data.path, "train", S, config.train.seed)
        self.validation = TokenDataset(config.data.path, "val", S, seed=None)

        self.config = config = with_vocabulary_of_data(config)
        self.folder = folder
        self.device = pick_device(config.train.device)
        torch.manual_seed(config.train.seed)  # dropout; the weights have seeds of their own

        self.model = Transformer(config.model).to(self.device)
        initialise(self.model, config.train.seed)
        self.optimizer = make_optimizer(self.model, config.train, self.device)
        self.forward = self.model
        if config.train.precision == "bf16":
            self.forward = low_precision(self.model, self.device)
        if config.train.compile:
            self.forward = torch.compile(self.forward)

        self.step = 0  # optimizer steps done
        self.position = 0  # samples read

    def train_step(self) -> dict:
        """Take one step; returns its row of the log, with loss and norm still on the device."""
        config = self.config.train
        rate = learning_rate(
            self.step, config.learning_rate, config.min_learning_rate, config.warmup_steps,
            config.steps,
        )
        batch = self.dataset.batch(self.position, config.global_batch_size)
        loss, grad_norm = train_step(
            self.forward, self.optimizer, self.micro_batches(batch), rate, config.clip_norm
        )
        self.step += 1
        self.position += config.global_batch_size
        return {"step": self.step, "loss": loss, "learning_rate": rate, "grad_norm": grad_norm,
                "tokens": self.tokens}

    @property
    def tokens(self) -> int:
        """Target tokens trained on so far."""
        return self.position * self.config.data.sequence_length

    def micro_batches(self, batch: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cut (GBS, S+1) tokens into (inputs, targets); the last micro-batch may be smaller."""
        parts = batch.to(self.device).split(self.config.train.micro_batch_size)
        return [(part[:, :-1], part[:, 1:]) for part in parts]

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the first `eval_sequences` validation sequences, nats per token."""
        num_sequences = min(self.config.train.eval_sequences, self.validation.num_samples)
        batch = self.validation.batch(0, num_sequences)
        self.model.eval()
        losses = [summed_loss(self.forward(inputs), targets)
                  for inputs, targets in self.micro_batches(batch)]
        self.model.train()
        return float(sum(losses)) / batch[:, 1:].numel()

    def sample(self, num_texts: int, num_tokens: int) -> list[str]:
        """Texts that the model writes after an end-of-document token; [] without a tokenizer."""
        tokenizer = load_tokenizer(self.config.data.path)
        if tokenizer is None:
            return []
        prompt = torch.full((num_texts, 1), end_of_document(tokenizer), device=self.device)
        tokens = generate(self.model, prompt, num_tokens, seed=self.config.train.seed)
        return tokenizer.decode_batch(tokens[:, 1:].tolist(), skip_special_tokens=False)

    def save(self) -> Path:
        """Write everything the next step depends on."""
        random_states = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random_states["cuda"] = torch.cuda.get_rng_state(self.device)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "position": self.position,
            "random_states": random_states,
            "config": to_dict(self.config),
        }
        folder = self.folder / "checkpoints"
        return checkpoint.save(folder, self.step, state, self.config.train.keep_checkpoints)

    def restore(self) -> None:
        """Continue exactly where the newest checkpoint was written."""
        state = checkpoint.load_latest(self.folder / "checkpoints")
        require_same_training(state["config"], to_dict(self.config), self.folder)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.position = state["step"], state["position"]
        torch.set_rng_state(state["random_states"]["cpu"])
        if self.device.type == "cuda" and "cuda" in state["random_states"]:
            torch.cuda.set_rng_state(state["random_states"]["cuda"], self.device)


def train(config: Config, folder: Path, resume: bool = False) -> Run:
    """Train until `config.train.steps`, or until SIGINT or SIGTERM, and save at the end.

    `folder` receives config.json, metrics.jsonl and checkpoints/. With `resume` the run in it is
    continued bit for bit; otherwise it must not hold one.
    """
    require(
        resume or not (folder / "metrics.jsonl").exists(),
        f"{folder}: already holds a run; add --resume to continue it, or choose another --run-dir",
    )
    run = Run(config, folder)
    if resume:
        run.restore()
    log = MetricsLog(folder / "metrics.jsonl")
    log.forget_after(run.step)
    (folder / "config.json").write_text(json.dumps(to_dict(run.config), indent=2) + "\n")

    # on a terminal a bar; elsewhere the lines of the evaluations remain
    bar = tqdm(total=config.train.steps, initial=run.step, disable=None, dynamic_ncols=True)
    with Interruption() as run.interruption, bar:
        loop(run, log, bar)
    log.close()
    return run


def loop(run: Run, log: MetricsLog, bar: tqdm) -> None:
    """Step, log, evaluate and save until the steps are done or a signal asks to stop."""
    config = run.config.train
    flops = cost.training_flops_per_token(run.config.model, run.config.data.sequence_length)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    clock = Clock(flops, peak_flops(run.device, dtype), run.device)
    rows: list[dict] = []

    while run.step < config.steps:
        rows.append(run.train_step())
        last = run.step == config.steps or run.interruption.signal is not None

        def due(every: int, last=last) -> bool:
            return last or (every > 0 and run.step % every == 0)

        if due(config.log_every) or due(config.eval_every) or due(config.checkpoint_every):
            speed = log_rows(run, log, rows, clock)
            bar.set_postfix_str(f"loss {float(rows[-1]['loss']):.3f}, {speed}")
            bar.update(len(rows))
            rows = []
        if due(config.eval_every):
            val_loss = run.evaluate()
            [text] = run.sample(num_texts=1, num_tokens=40) or [""]
            log.write(step=run.step, tokens=run.tokens, val_loss=val_loss, sample=text)
            line = f"step {run.step:>6,}   validation loss {val_loss:.4f}   {speed}"
            bar.write(f"{line}\n  {' '.join(text.split())}", file=sys.stderr)
        if due(config.checkpoint_every):
            run.save()
        if due(config.eval_every) or due(config.checkpoint_every):
            clock.start()  # evaluating and saving are not training
        if last:
            break


def log_rows(run: Run, log: MetricsLog, rows: list[dict], clock: Clock) -> Speed:
    """Write the rows since the last call; only here the host waits for the device."""
    tokens = len(rows) * run.config.train.global_batch_size * run.config.data.sequence_length
    speed = clock.lap(tokens, len(rows))
    for row in rows:
        log.write(
            **row | {"loss": float(row["loss"]), "grad_norm": float(row["grad_norm"])},
            tokens_per_second=speed.tokens_per_second,
            mfu=speed.mfu,
        )
    return speed


def with_vocabulary_of_data(config: Config) -> Config:
    """Fill in `model.vocab_size` from the data, or check that the data's tokens fit in it."""
    data_size = read_corpus_info(config.data.path)["vocab_size"]
    model_size = config.model.vocab_size
    require(
        model_size == 0 or model_size >= data_size,
        f"model.vocab_size = {model_size} is smaller than the {data_size} tokens of "
        f"{config.data.path}: set it to 0 or to at least {data_size}",
    )
    if model_size > 0:
        return config
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=data_size)
    )


def require_same_training(saved: dict, asked: dict, folder: Path) -> None:
    """Raise ConfigError if the asked run has another model, data or seed than the saved one."""
    fixed = {(section, key) for section in ("model", "data") for key in saved[section]}
    for section, key in sorted(fixed | {("train", "seed")}):
        before, now = saved[section][key], asked[section][key]
        require(
            before == now,
            f"{section}.{key} = {now}, but {folder} was trained with {before}: "
            f"set it to {before}, or start a new run without --resume",
        )


@dataclass(frozen=True)
class TrainOptions(Config):
    """Train a model as a TOML file says, with any field overridden."""

    file: tyro.conf.Positional[Path | None] = None
    """TOML file with the tables [model], [data], [train]; must come first."""
    run_dir: Path | None = None
    """Where the run is kept. Default: runs/NAME of the file, numbered if it is taken."""
    resume: bool = False
    """Continue the run bit for bit from its newest checkpoint."""


def read_options(args: list[str], kind: type[TrainOptions] = TrainOptions) -> TrainOptions:
    """Read the command line of a training run; raises ConfigError with one line."""
    defaults = kind()
    if args and not args[0].startswith("-"):
        defaults = kind(**vars(load(Path(args[0]))))
    elif "--resume" in args and "--run-dir" in args[:-1]:
        saved = Path(args[args.index("--run-dir") + 1]) / "config.json"
        require(saved.is_file(), f"{saved}: there is no run to resume; check --run-dir")
        defaults = kind(**vars(from_dict(json.loads(saved.read_text()), where=str(saved))))
    return command_line.parse(kind, args, "minitron train", defaults)


def start(options: TrainOptions) -> Run:
    """Start or resume the run that `options` ask for, and say how to continue a stopped one."""
    require_one_process()
    folder = options.run_dir or default_folder(options.file, options.resume)
    config = Config(options.model, options.data, options.train, options.parallel)
    run = train(config, folder, options.resume)
    if run.interruption.signal is not None:
        print(f"\nStopped by {run.interruption.signal.name} at step {run.step:,}; saved. "
              f"Continue:\n  minitron train --resume --run-dir {folder}")
    return run


def default_folder(file: Path | None, resume: bool) -> Path:
    """runs/NAME, runs/NAME-2, ...: the newest one there to resume, else the first one free."""
    name = file.stem if file else "train"
    folders = [Path("runs") / name]
    while (folders[-1] / "metrics.jsonl").exists():
        folders.append(Path("runs") / f"{name}-{len(folders) + 1}")
    return folders[-2] if resume and folders[1:] else folders[-1]


def main(args: list[str]) -> int:
    """Train; returns 0, or 128 plus the signal's number if one stopped the run."""
    run = start(read_options(args))
    print(f"{run.step:,} steps done; the run is kept in {run.folder}")
    return exit_code(run)


def exit_code(run: Run) -> int:
    return 0 if run.interruption.signal is None else 128 + run.interruption.signal


if __name__ == "__main__":
    command_line.run(main)
