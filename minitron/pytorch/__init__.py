"""What PyTorch keeps private or does not name."""

SLOW_TO_IMPORT = "torch._dynamo"
"""What PyTorch imports with the first optimizer or checkpoint (1 s): processes that fork ranks
import it early. It stands here because `private` imports torch, which takes time itself."""
