"""[value]: the value model: its optimizer, its loss, its warm-up and pretraining, and which of its parameters learn."""

from typing import Literal

from pydantic import Field

from megatron_sao.config.section import Optimizer, Section


class TrainedGroup(Section):
    """A parameter group that learns unless told otherwise."""

    trained: bool = Field(True, description="false = frozen: no gradient, no optimizer state, bit-identical for ever")
    lr_multiplier: float = Field(1.0, gt=0, description="times value.lr")


class FrozenGroup(TrainedGroup):
    """A parameter group that is frozen unless told otherwise."""

    trained: bool = Field(False, description="true = learns")


class Groups(Section):
    """Parameters by the role of their module, not by a pattern of their names."""

    attention: FrozenGroup = FrozenGroup()
    norms: FrozenGroup = FrozenGroup()
    embeddings: FrozenGroup = FrozenGroup()
    router: TrainedGroup = TrainedGroup()
    experts: TrainedGroup = TrainedGroup()
    shared_experts: TrainedGroup = TrainedGroup()
    dense_mlp: TrainedGroup = TrainedGroup()
    head: TrainedGroup = TrainedGroup()


class Value(Optimizer):
    lr: float = Field(5e-6, gt=0, description="peak learning rate; constant after its warm-up")
    updates_per_step: int = Field(2, ge=1, description="K: value updates for each policy update")
    warmup_steps: int = Field(10, ge=0, description="value-only steps before the first policy update, at most")
    warmup_until_explained_variance: float = Field(
        0.0, ge=0, lt=1, description="end the warm-up early above this explained variance; 0 = do all of warmup_steps"
    )
    loss: Literal["mse", "hl_gauss"] = Field("mse", description="0.5 * (V - target)^2, or cross-entropy over bins")
    value_clip: float = Field(0.0, ge=0, description="loss mse: largest change of V within a step; 0 = no clipping")
    hl_gauss_bins: int = Field(51, ge=2, description="loss hl_gauss: bins of equal width between min and max")
    hl_gauss_min: float = Field(-0.5, description="loss hl_gauss: lowest value")
    hl_gauss_max: float = Field(1.5, description="loss hl_gauss: highest value")
    hl_gauss_sigma: float = Field(0.03, gt=0, description="loss hl_gauss: deviation of a target, in units of the value")
    pretrain_trajectories: int = Field(
        0, ge=0, description="trajectories of the frozen policy to pretrain on; 0 = none"
    )
    pretrain_epochs: int = Field(1, ge=1, description="passes over them")
    pretrain_batch_trajectories: int = Field(64, ge=1, description="trajectories of one pretraining update")
    pretrain_holdout: float = Field(0.1, gt=0, lt=1, description="share of them kept to measure explained variance on")
    groups: Groups = Groups()
