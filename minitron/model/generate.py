"""Sample text from a trained model, without a key-value cache: clarity before speed."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: Tensor,
    num_tokens: int,
    seed: int = 0,
    temperature: float = 1.0,
    go_on: Callable[[], bool] = lambda: True,
) -> Tensor:
    """Continue `tokens` (B, S) by `num_tokens` sampled ones; returns (B, S + num_tokens).

    Only the last `max_sequence_length` tokens are seen. Sampling draws from a generator of its own
    on the CPU, so it leaves the run's random state alone and is the same on every device. `go_on`
    is asked after each token: if it says no, there are no more.
    """
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    for _ in range(num_tokens):
        window = tokens[:, -model.config.max_sequence_length :]
        logits = model(window)[:, -1].float().cpu() / temperature  # (B, V)
        following = torch.multinomial(logits.softmax(-1), 1, generator=generator)  # (B, 1)
        tokens = torch.cat([tokens, following.to(tokens.device)], dim=1)
        if not go_on():
            break
    model.train(was_training)
    return tokens
