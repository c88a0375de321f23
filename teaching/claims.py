"""What captions claim of measurements, and what they say where the measurement shows otherwise."""

import math
import os

REFUTED = "This run does not show it"


def claim(holds: bool, text: str) -> str:
    """Return what a caption says of a measurement: `text` if it holds, else that it does not.

    `make chapters` refuses a notebook in which a claim does not hold. On a learner's machine the
    likeliest reason is that it is busy, so the caption names the load.
    """
    if holds:
        return text
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan
    return (
        f"{REFUTED}, on a machine with a load of {busy:.1f} on {os.cpu_count()} cores; run the "
        f"cell again when nothing else is running. Expected: {text}"
    )
