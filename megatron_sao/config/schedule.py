"""[schedule]: what a step trains on, and how far rollouts may run ahead."""

from pydantic import Field

from megatron_sao.config.section import Section


class Schedule(Section):
    batch_trajectories: int = Field(128, ge=1, description="trajectories of one step")
    max_staleness: int = Field(4, ge=0, description="largest lag, in pushes, of a trajectory's oldest action token")
    max_in_flight: int = Field(
        0, ge=0, description="episodes that run at the same time, at most; 0 = what the engines and freshness allow"
    )
    batch_timeout_s: float = Field(600.0, gt=0, description="time the trainer waits for one batch")
    port: int = Field(0, ge=0, le=65535, description="where the scheduler listens for the trainer; 0 = pick a free one")
