"""The models and devices that several decks draw."""

from minitron import cost
from minitron.plan.hardware import DEVICES
from teaching.lab import large_plans

LLAMA_8B = cost.published_llama(32, 4096, 32, 8, 14_336, 128_256, 8192)
"""Llama 3 8B."""
LLAMA_8B_HOURS = 1.3e6
"""GPU-hours of H100s that its training took, by its model card."""
GPT3 = large_plans.GPT3
"""GPT-3 175B with a vocabulary that 8 ranks can share."""
A100, H100 = DEVICES["A100-SXM-80GB"], DEVICES["H100-SXM-80GB"]
