"""What trains: a model cut over the ranks, its optimizer, and one step of both."""

import math

import torch
from torch import Tensor

from minitron.comm.mesh import Mesh
from minitron.config import Config
from minitron.parallel.grid import Combined
from minitron.parallelize import build
from minitron.precision import PRECISIONS, LossScale, low_precision
from minitron.step import IGNORED, make_optimizer, train_step


class Training:
    """A model, cut as `config` says, its optimizer, and a step of both: all but data and disk."""

    def __init__(self, config: Config, mesh: Mesh | None, device: torch.device):
        self.config, self.device = config, device
        self.model, self.parallel = build(config, mesh, device)
        self.data_rank, self.data_size = (0, 1) if mesh is None else self.parallel.data_part
        if config.parallel.pp > 1:  # now, rather than in the first step
            self.parallel.pipeline.script(self.num_micro_batches(config.train.global_batch_size))
        self.optimizer = make_optimizer(self.model, config.train, device)
        self.whole = self.parallel or Combined(self.model, None, None)
        self.whole.shard(self.optimizer)
        self.forward = self.model
        self.precision = precision = PRECISIONS[config.train.precision]
        if config.train.precision != "fp32":
            self.forward = low_precision(self.model, device, precision)
        self.loss_scale = LossScale() if precision.scales_loss else None

    def update(
        self, micro_batches: list[tuple[Tensor, Tensor]], rate: float
    ) -> tuple[Tensor, Tensor]:
        """Move the weights once; returns the loss and the gradient's norm, 0-d."""
        return train_step(
            self.forward, self.optimizer, micro_batches, rate, self.config.train.clip_norm,
            self.parallel, self.loss_scale,
        )

    def micro_batches(self, batch: Tensor, num_sequences: int) -> list[tuple[Tensor, Tensor]]:
        """Cut this rank's (B, S+1) tokens of all ranks' `num_sequences` into (inputs, targets).

        The last one may be smaller. Every rank gets as many, as sharded training demands: where
        the ranks with most sequences have one more, the others get one without targets.
        """
        size = self.config.train.micro_batch_size
        parts = batch.to(self.device).split(size)
        pairs = [(part[:, :-1], part[:, 1:]) for part in parts]

        if len(pairs) < self.num_micro_batches(num_sequences):
            inputs, targets = pairs[0][0][:1], pairs[0][1][:1]
            pairs.append((inputs, torch.full_like(targets, IGNORED)))
        return pairs

    def num_micro_batches(self, num_sequences: int) -> int:
        """In how many micro-batches the ranks with most of the sequences read theirs."""
        most = math.ceil(num_sequences / self.data_size)
        return math.ceil(most / self.config.train.micro_batch_size)
