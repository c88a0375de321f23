"""The first module that makes an infinity or NaN is named, in either direction."""

import math

import torch
from torch import nn

from minitron.measure.divergence import FirstNonFinite


class Poison(torch.autograd.Function):
    """Returns what it reads; its gradient is not a number."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.nan


class Layers(nn.Module):
    """Three linear layers; what happens after the second is up to the test."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.between = between

    def forward(self, x):
        return self.third(self.between(self.second(self.first(x))))


def place_of(model, x) -> str | None:
    with FirstNonFinite(model, dict(model.named_parameters())) as fault:
        model(x).sum().backward()
    assert not any(module._forward_hooks for module in model.modules())
    return fault.place


def test_the_first_place_is_named():
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    assert place_of(Layers(nn.Identity()), x) is None
    assert place_of(Layers(lambda x: x / 0), x) == "the input of third"
    assert place_of(Layers(Poison.apply), x) == "the gradient of the output of second"
    assert place_of(Layers(nn.Identity()), x * math.inf) == "the input of the model"

    large = Layers(nn.Identity())
    with torch.no_grad():
        large.second.weight.fill_(3e38)
    assert place_of(large, x) == "the output of second"
    with torch.no_grad():
        large.third.bias[1] = math.nan
    assert place_of(large, x) == "the weight third.bias"
