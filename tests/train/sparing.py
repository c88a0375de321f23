"""What training may leave out in tests, in this process and in the ranks it starts.

A rank finds this module imported, and with it what the functions that tests send there need.
"""

import pytest  # noqa: F401

from minitron import train_log
from minitron.measure import clock
from teaching import report  # noqa: F401

train_log.SAMPLE_TOKENS = 8
clock.MEASURING_SECONDS = 0.02
