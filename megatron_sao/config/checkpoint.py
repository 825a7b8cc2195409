"""[checkpoint]: when a run writes down everything it needs to go on later."""

from pydantic import Field

from megatron_sao.config.section import Section


class Checkpoint(Section):
    every_steps: int = Field(
        20, ge=0, description="save after every so many steps; 0 = only when the run is stopped, or for keep_best"
    )
    keep_last: int = Field(2, ge=1, description="newest checkpoints that are kept")
    keep_every: int = Field(0, ge=0, description="also keep those whose step is a multiple of this; 0 = none")
    keep_best: int = Field(
        0, ge=0, description="also save after each evaluation (run.eval_every) and keep so many of the best pass rate"
    )
    in_background: bool = Field(
        False, description="training goes on while files are written; takes a copy of all state in host memory"
    )
    timeout_s: float = Field(1800.0, gt=0, description="time one rank's part of a save or of a resume may take")
    stop_grace_s: float = Field(
        300.0, gt=0, description="a run that is told to stop finishes its step and saves within this time, or is killed"
    )
