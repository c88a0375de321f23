"""The models that `benchmarks/gpu.py` measures on a GPU, and for which the chapters predict."""

from dataclasses import replace

from minitron.config import ModelConfig
from minitron.corpus.story_grammar import VOCABULARY

LLAMA = ModelConfig("llama", 32000, 2048, 24, 2048, 16, 16, 5632, tied_embedding=False)
GPT2 = ModelConfig("gpt", 50304, 1024, 12, 768, 12, 12, 3072)

STEPS = {"GPT-2 124M": (GPT2, 32, 1024), "Llama 1.3B": (LLAMA, 4, 2048)}
"""Of part "mfu": model, sequences per step, tokens of a sequence."""

HALF_LLAMA = replace(LLAMA, num_layers=12)
"""Of part "memory": with 4 sequences, all of its activations fit beside its state."""
SIX_LAYERS = replace(LLAMA, num_layers=6)
"""Of part "overlap"."""
STORYTELLER = ModelConfig("llama", -(-len(VOCABULARY) // 64) * 64, 512, 4, 2048, 16, 16, 5632)
"""Of part "precision"."""
SEQUENCES, STORIES = 4, 8
"""Of a step of parts "memory" and "overlap", and of part "precision"."""
