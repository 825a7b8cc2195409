"""Every error this project raises on purpose.

Each message says what was given, what is allowed and where to change it, so that it can be read without the code:
`parallel.tp = 3 does not divide model.num_heads = 32; use 1, 2, 4, 8, 16 or 32`.
A command-line program prints the message alone (no traceback) for these classes and exits with `exit_code`.
"""


class SaoError(Exception):
    """Base class: a fault that was foreseen and explained."""

    exit_code = 1


class ConfigError(SaoError):
    """The user's configuration cannot be run. Carries every fault found, one per line."""

    exit_code = 2


class DataError(SaoError):
    """A prompt file, a reward or a sampled token is malformed; the message names the file and line or the sample."""

    exit_code = 3


class CheckpointError(SaoError):
    """A model folder or checkpoint is missing, truncated or does not fit; names tensor, expected and found shape."""

    exit_code = 4


class ProtocolError(SaoError):
    """Another process broke the agreement: a missing name, a version that fell, an answer out of turn."""

    exit_code = 5


class EngineError(SaoError):
    """A rollout engine did not start, died or answered with an error."""

    exit_code = 6


class TrainingError(SaoError):
    """The numbers went bad (repeated non-finite steps, frozen weights that moved) and the run was stopped."""

    exit_code = 7
