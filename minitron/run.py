"""A run: everything it owns, one step of it, and what its checkpoint holds."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from minitron import checkpoint
from minitron.comm.agreement import (
    SINGLE_RANK,
    Group,
    all_gather_objects,
    raise_on_all_ranks,
)
from minitron.config import Config, ConfigError
from minitron.config.file import from_dict, to_dict
from minitron.config.layout import data_parallel_size, require_ranks
from minitron.corpus.contents import Contents, fingerprint, read_contents, require_tokens
from minitron.corpus.folder import end_of_document, load_tokenizer, read_corpus_info
from minitron.dataset import TokenDataset
from minitron.launch.process import memory_bytes, pick_device
from minitron.measure.divergence import FirstNonFinite
from minitron.model.generate import generate
from minitron.model.recompute import has_generator
from minitron.parallel.parts import Chunks
from minitron.parallel.state import load_training_state, training_state
from minitron.parallelize import lay_out
from minitron.precision import low_precision, widest_float
from minitron.running.folder import kept_tokenizer
from minitron.running.memory import require_memory
from minitron.running.schedule import Schedule, resumed
from minitron.running.starting import (
    read_facts,
    require_a_gpu_each,
    require_complete_state,
    require_same_training,
    require_validation,
    with_vocabulary_of_data,
)
from minitron.running.stopping import Stop
from minitron.running.training import Training
from minitron.step import accumulate_over_ranks
from minitron.system.progress import CLOCK, Progress


class Run(Training):
    """A model in training: what it owns, one step of it, and what a checkpoint holds.

    `group` holds all ranks; `SINGLE_RANK` is a run of one process. `contents` are those of the
    data, if they have been read already.

    `step` counts the optimizer steps done, of which `first_step` were done before this process
    began. Raises ConfigError if data, model, device and ranks do not fit together.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        group: Group = SINGLE_RANK,
        contents: dict[str, Contents] | None = None,
    ):
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.folder = folder
        with raise_on_all_ranks(group):  # also what one node alone has not got
            self.open_data(config)
            config = with_vocabulary_of_data(config)  # which tp divides
            require_ranks(config, self.size)
            require_validation(self.num_eval_sequences, data_parallel_size(config, self.size))
            device = pick_device(config.train.device)
            require_a_gpu_each(device, group)
            require_memory(
                config, self.size, memory_bytes(device), str(device), self.num_eval_sequences
            )

        contents = contents or read_contents(config.data.path, group)
        require_tokens(config.data.path, contents, config.model.vocab_size)
        self.fingerprint = fingerprint(self.dataset, contents)

        mesh = lay_out(config.parallel, self.size, device)
        with Progress(desc="building the model", bar_format=CLOCK, disable=self.rank != 0):
            super().__init__(config, mesh, device)
        self.dropout_part = self.data_rank + mesh.rank("pp") * self.data_size
        if config.train.compile:
            # A ledger's hook fires for the compiled module too: it only notes a forward pass.
            warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are")
            self.forward = torch.compile(self.forward)

        self.saver = checkpoint.Saver(
            folder / "checkpoints",
            config.train.keep_checkpoints,
            group,
            config.train.async_checkpoint,
        )
        self.stop = Stop(group)
        self.schedule = Schedule.of(config.train)
        self.step = self.first_step = 0
        self.seed_dropout()
        self.position = 0  # samples trained on
        self.read_ahead: tuple[int, Tensor] | None = None

    def open_data(self, config: Config) -> None:
        S = config.data.sequence_length
        # both now: another corpus may be written into the folder while the run goes on
        self.corpus_info = read_corpus_info(config.data.path)
        self.tokenizer = load_tokenizer(config.data.path)
        self.dataset = TokenDataset(config.data.path, "train", S, config.train.seed)
        self.validation = TokenDataset(config.data.path, "val", S, seed=None)
        self.num_eval_sequences = min(config.train.eval_sequences, self.validation.num_samples)

    def next_batch(self) -> Tensor:
        """Return this rank's tokens of the next step, (B, S+1), which are read once.

        The loop asks for them before the ranks agree to go on: a shard that only one rank finds cut
        short ends all of them after the same step.
        """
        if self.read_ahead is None or self.read_ahead[0] != self.position:
            tokens = self.dataset.batch(
                self.position, self.config.train.global_batch_size, self.data_rank, self.data_size
            )
            self.read_ahead = self.position, tokens
        return self.read_ahead[1]

    def train_step(self) -> dict:
        """Take one step; returns its row of the log, with loss and norm still on the device."""
        config = self.config.train
        rate = self.schedule.rate(self.step)
        micro_batches = self.micro_batches(self.next_batch(), config.global_batch_size)
        random_state = self.random_state()  # a step that fails is repeated, to tell where
        try:
            loss, grad_norm = self.update(micro_batches, rate)
        except FloatingPointError as error:
            self.set_random_state(random_state)
            raise ConfigError(
                f"step {self.step + 1}: {error}. {self.fault(micro_batches)}",
                "inspect these samples, lower train.learning_rate, or lower train.clip_norm",
            ) from None
        self.step += 1
        self.position += config.global_batch_size
        row = {
            "step": self.step,
            "loss": loss,
            "learning_rate": rate,
            "grad_norm": grad_norm,
            "tokens": self.tokens,
        }
        return row | self.loss_scale.row()

    def fault(self, micro_batches: list[tuple[Tensor, Tensor]]) -> str:
        """Repeat a step that has failed, and say where its numbers went wrong; all ranks call."""
        self.optimizer.zero_grad()
        forward = low_precision(self.model, self.device, self.precision)  # never compiled
        weights = {name: part.values for name, part in self.parallel.parts()}
        with FirstNonFinite(self.model, weights) as fault:
            accumulate_over_ranks(forward, micro_batches, self.parallel)
        _, rank, place = min(all_gather_objects((fault.order, self.rank, str(fault)), self.group))
        last = self.position + self.config.train.global_batch_size - 1
        return (
            f"First non-finite value: {place}, on rank {rank} (samples {self.position:,} to "
            f"{last:,}). The run stopped before it updated the weights; "
            f"{self.saver.newest()}"
        )

    @property
    def tokens(self) -> int:
        """Target tokens trained on so far, by all ranks."""
        return self.position * self.config.data.sequence_length

    @torch.no_grad()
    def evaluate(self, go_on: Callable[[], bool] = lambda: True) -> float | None:
        """Return the mean loss over the first `eval_sequences` validation sequences, per token.

        They are read in pieces that have at most as many micro-batches as a step. After each piece
        all ranks ask `go_on`, which must answer the same on each: if it says no, there is no loss.
        """
        num_sequences = self.num_eval_sequences
        with raise_on_all_ranks(self.group):
            batch = self.validation.batch(0, num_sequences, self.data_rank, self.data_size)
        micro_batches = self.micro_batches(batch, num_sequences)
        size = self.num_micro_batches(self.config.train.global_batch_size)
        total, is_complete = 0.0, True
        self.model.eval()
        for start in range(0, len(micro_batches), size):
            piece = micro_batches[start : start + size]
            loss = self.parallel.sum_losses(self.forward, piece)
            total += float(loss)  # the host waits: a piece has ended when the device is done
            is_complete = go_on()
            if not is_complete:
                break
        self.model.train()
        num_tokens = num_sequences * self.config.data.sequence_length
        mean = self.parallel.mean(
            torch.tensor(total, dtype=widest_float(self.device), device=self.device)
        )
        return float(mean) * self.data_size / num_tokens if is_complete else None

    def sample(
        self, num_texts: int, num_tokens: int, go_on: Callable[[], bool] = lambda: True
    ) -> list[str]:
        """Sample texts that the model writes after an end-of-document token; [] if no tokenizer.

        All ranks ask `go_on` after each token: if it says no, the texts end there.
        """
        if self.tokenizer is None:
            return []
        prompt = torch.full((num_texts, 1), end_of_document(self.tokenizer), device=self.device)
        model, seed = self.parallel.full_model(), self.config.train.seed
        tokens = generate(model, prompt, num_tokens, seed=seed, go_on=go_on)
        return self.tokenizer.decode_batch(tokens[:, 1:].tolist(), skip_special_tokens=False)

    def save(self) -> None:
        """Write everything the next step depends on; every rank writes its part of it.

        Raises ConfigError on every rank if a weight is not finite: that is not worth keeping.
        """
        is_sound = all(bool(part.values.isfinite().all()) for _, part in self.parallel.parts())
        with raise_on_all_ranks(self.group):
            if not is_sound:
                raise ConfigError(
                    f"step {self.step}: weights are not finite, and were not saved; "
                    f"{self.saver.newest()}",
                    "lower train.learning_rate, or clip the gradient with train.clip_norm",
                )
        random_state = {name: Chunks.full(state) for name, state in self.random_state().items()}
        facts = {
            "step": self.step,
            "position": self.position,
            "num_ranks": self.size,
            "config": to_dict(self.config),
            "continued": {"start": self.schedule.start, "last_rate": self.schedule.last_rate},
            "fingerprint": self.fingerprint,
            "loss_scale": self.loss_scale.state_dict(),
        }
        state = training_state(self.parallel, self.optimizer)
        self.saver.save(self.step, state | random_state, facts)

    def random_state(self) -> dict[str, Tensor]:
        """Return the state of this rank's generators, by a name in the checkpoint."""
        state = {f"random.cpu.{self.rank}": torch.get_rng_state()}
        if has_generator(self.device):
            module = torch.get_device_module(self.device)
            state[f"random.{self.device.type}.{self.rank}"] = module.get_rng_state(self.device)
        return state

    def set_random_state(self, state: dict[str, Tensor]) -> None:
        try:
            torch.set_rng_state(state[f"random.cpu.{self.rank}"])
            if has_generator(self.device):
                torch.get_device_module(self.device).set_rng_state(
                    state[f"random.{self.device.type}.{self.rank}"], self.device
                )
        except RuntimeError as error:  # only from a checkpoint that was not written by us
            raise ConfigError(
                f"{self.folder}: its newest checkpoint has no valid random-number state ({error})",
                "move that checkpoint away to resume from the one before",
            ) from None

    def seed_dropout(self) -> None:
        """Seed the generators by the run's seed, the step, and the samples and layers of this rank.

        Ranks of one tensor-parallel group share the numbers. The step is part of the seed: a run
        that continues in a different layout must not draw the masks of its first steps again.
        """
        words = f"dropout/{self.config.train.seed}/{self.step}/{self.dropout_part}"
        torch.manual_seed(Random(words).getrandbits(63))

    def restore(self, beat: Callable[[], None] = lambda: None) -> None:
        """Continue exactly where the newest good checkpoint was written, even in another layout.

        In another layout dropout draws new masks, as in `seed_dropout`. `beat` is called when the
        checkpoint's checksums have been verified, which reads all of it, before it is loaded, which
        reads it again.
        """
        folder = self.folder / "checkpoints"
        path = checkpoint.newest_good(folder, self.group)
        beat()
        facts = read_facts(checkpoint.facts_of(path), path)
        require_same_training(facts, self.config, self.folder, self.fingerprint)
        self.resume_schedule(facts)
        saved = checkpoint.saved_tensors(path)
        require_complete_state(saved, path)
        with raise_on_all_ranks(self.group):
            self.tokenizer = kept_tokenizer(self.folder) or self.tokenizer
        checkpoint.set_aside(folder, path, self.group)
        read = partial(checkpoint.load, path, group=self.group)
        load_training_state(self.parallel, self.optimizer, saved, read)
        self.step = self.first_step = facts["step"]
        self.position = facts["position"]
        self.loss_scale.load_state_dict(facts["loss_scale"])

        self.seed_dropout()
        # of the layout, tp tells whose numbers are the same, pp who drops what
        layouts = [
            [table["parallel"].get(axis, 1) for axis in ("tp", "pp")]
            for table in (facts["config"], to_dict(self.config))
        ]
        if layouts[0] == layouts[1] and facts["num_ranks"] == self.size:
            state = self.random_state()
            read({name: Chunks.full(own) for name, own in state.items() if name in saved})
            with raise_on_all_ranks(self.group):
                self.set_random_state(state)

    def resume_schedule(self, facts: dict) -> None:
        """Take over the schedule of a checkpoint's `facts`, or continue it as the config asks."""
        train = self.config.train
        recorded = Schedule.of(from_dict(facts["config"]).train, **facts["continued"])
        self.schedule = resumed(recorded, Schedule.of(train), facts["step"], self.folder)
        train = replace(train, continuation=self.schedule.continuation)  # for the next checkpoint
        self.config = replace(self.config, train=train)
