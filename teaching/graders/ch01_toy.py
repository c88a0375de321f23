"""The model of the grader of 1.1, which watches how it is used."""

from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SEQUENCE, VOCABULARY, WIDTH = 5, 7, 3


class Box:
    """Holds what autograd has saved, as long as its graph does."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class TinyModel(nn.Module):
    """A float64 model with a tied head and a frozen shift that notes its passes, in order."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(11)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.embedding = nn.Parameter(random(VOCABULARY, WIDTH))
        self.mix = nn.Parameter(random(WIDTH, WIDTH))
        self.shift = nn.Parameter(random(WIDTH), requires_grad=False)
        self.passes: list[str] = []
        self.saved: WeakSet[Box] = WeakSet()
        self.num_alive = 0
        """Most tensors saved for a backward pass that were there when a forward pass began."""
        self.num_evaluating = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.num_alive = max(self.num_alive, len(self.saved))
        self.num_evaluating += not self.training
        with saved_tensors_hooks(self.save, lambda box: box.tensor):
            return self.compute(tokens)

    def save(self, tensor: Tensor) -> "Box":
        box = Box(tensor)
        self.saved.add(box)
        return box

    def compute(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.embedding[tokens] @ self.mix + self.shift)
        logits = hidden @ self.embedding.T
        self.passes.append(f"forward of {len(tokens)}")
        if logits.requires_grad:
            logits.register_hook(lambda _: self.passes.append("backward"))
        return logits

    def trainable(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.named_parameters() if p.requires_grad}
