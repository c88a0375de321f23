"""How long a training takes, and what it costs: days, GPU-hours, money, energy.

A GPU draws less than its datasheet says, and a machine room more than its GPUs: measured watts make
a better estimate, times PUE, the room's energy over that of what computes in it.

Read in this order: training_days, gpu_hours, energy, Bill, bill.
Reference: Narayanan et al. 2021, section 5.1 (equation 4); Patterson et al. 2021, "Carbon Emissions
and Large Neural Network Training", section 2.
"""

import math
from dataclasses import dataclass

from minitron.config import require

SECONDS_PER_DAY = 24 * 60 * 60
TYPICAL_PUE = 1.1
"""Of large machine rooms built for it; of an average one 1.6 (Patterson et al. 2021, section 2)."""


def training_days(flops: float, num_gpus: int, flops_per_second: float) -> float:
    """Return the days for so many FLOPs in all, at the rate that each GPU reaches.

    With 8 T P for `flops`, the forward pass of P parameters and T tokens done twice, this is
    equation 4 of Narayanan et al. 2021.
    """
    return flops / (num_gpus * flops_per_second) / SECONDS_PER_DAY


def gpu_hours(num_gpus: int, days: float) -> float:
    return 24 * num_gpus * days


def energy(hours: float, watts: float, pue: float = TYPICAL_PUE) -> float:
    """Return the MWh that so many GPU-hours take (Patterson et al. 2021, section 2).

    `watts` of a GPU with its share of the node, on average; `pue` is 1 for them alone.
    """
    return hours * watts * pue / 1e6


@dataclass(frozen=True)
class GpuHour:
    """What an hour of one GPU draws and costs."""

    watts: float | None = None
    """On average; None: not known."""
    pue: float = TYPICAL_PUE
    price: float | None = None
    currency: str = "USD"

    def __post_init__(self):
        for name in ("watts", "pue", "price"):
            value = getattr(self, name)
            require(value is None or math.isfinite(value), f"--{name} {value}: must be a number")
        require(
            self.watts is None or self.watts > 0, f"--watts {self.watts}: must be greater than 0"
        )
        require(
            self.pue >= 1,
            f"--pue {self.pue:g}: a machine room draws at least what its GPUs do, so 1 or more",
        )
        require(self.price is None or self.price >= 0, f"--price {self.price}: must be 0 or more")


@dataclass(frozen=True)
class Bill:
    """What a training takes."""

    steps: int
    days: float
    gpu_hours: float
    megawatt_hours: float | None
    price: float | None
    """In a GPU-hour's currency. None, as the energy: an hour's is not known."""


def bill(
    tokens: float, tokens_per_step: int, step_seconds: float, num_gpus: int, gpu_hour: GpuHour
) -> Bill:
    """Add up a training on `tokens`, without pauses; what is left of the last step counts whole."""
    steps = math.ceil(tokens / tokens_per_step)
    days = steps * step_seconds / SECONDS_PER_DAY
    hours = gpu_hours(num_gpus, days)
    price = None if gpu_hour.price is None else gpu_hour.price * hours
    drawn = None if gpu_hour.watts is None else energy(hours, gpu_hour.watts, gpu_hour.pue)
    return Bill(steps, days, hours, drawn, price)
