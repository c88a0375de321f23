"""What trains: a model, divided over the ranks, its optimizer, and one step of both."""

import math

import torch
from torch import Tensor

from minitron.comm.mesh import Mesh
from minitron.config import Config
from minitron.parallelize import build
from minitron.precision import PRECISIONS, low_precision
from minitron.step import IGNORED, make_optimizer, train_step


class Training:
    """A model, divided as `config` says, its optimizer, and a step of both: no data, no disk."""

    def __init__(self, config: Config, mesh: Mesh, device: torch.device):
        self.config, self.device = config, device
        self.model, self.parallel = build(config, mesh, device)
        self.data_rank, self.data_size = self.parallel.data_part
        # now, rather than in the first step
        self.parallel.require_runnable(self.num_micro_batches(config.train.global_batch_size))
        self.optimizer = self.parallel.shard(make_optimizer(self.model, config.train, device))
        self.precision = precision = PRECISIONS[config.train.precision]
        self.forward = self.model
        if config.train.precision != "fp32":
            self.forward = low_precision(self.model, device, precision)
        self.loss_scale = precision.make_loss_scale()

    def update(
        self, micro_batches: list[tuple[Tensor, Tensor]], rate: float
    ) -> tuple[Tensor, Tensor]:
        """Move the weights once; returns the loss and the gradient's norm, 0-d."""
        return train_step(
            self.forward,
            self.optimizer,
            micro_batches,
            rate,
            self.config.train.clip_norm,
            self.parallel,
            self.loss_scale,
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
        """Return in how many micro-batches the ranks with most of the sequences read theirs."""
        most = math.ceil(num_sequences / self.data_size)
        return math.ceil(most / self.config.train.micro_batch_size)
