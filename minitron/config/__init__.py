"""A run's settings: its fields, TOML files and the command line, and what must fit together."""

from minitron.config.checks import require_positive
from minitron.config.schema import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from minitron.system.errors import ConfigError, require

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "LogConfig",
    "ModelConfig",
    "ParallelConfig",
    "TrainConfig",
    "require",
    "require_positive",
]
