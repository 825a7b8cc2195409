"""[run]: the name, the length and the outputs of a run."""

from pydantic import Field

from megatron_sao.config.section import Section


class Run(Section):
    name: str = Field(
        "local", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="the run folder is run.folder/run.name"
    )
    folder: str = Field("runs", min_length=1, description="where run folders lie; relative to the current folder")
    seed: int = Field(1, ge=0, lt=2**31, description="seed of everything that is drawn at random")
    steps: int = Field(120, ge=0, description="policy updates; value warm-up steps come on top")
    eval_every: int = Field(
        0, ge=0, description="evaluate held-out prompts every so many steps; 0 = before and after only"
    )
    trajectories_every: int = Field(1, ge=0, description="write the trajectories of every so many steps; 0 = never")
    stop_after_bad_steps: int = Field(
        5, ge=1, description="steps in a row with gradients that are not finite, at which the run stops"
    )
    threads_per_process: int = Field(1, ge=1, description="CPU threads of each trainer rank and engine")
    deterministic: bool = Field(
        False, description="only algorithms that give the same bits each time, where they exist"
    )
