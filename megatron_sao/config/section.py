"""What every section of the configuration has in common.

Invariants: types are strict (true is not 1, "3" is not 3, 3.0 is not 3; an integer is a number), an unknown key is
a fault, numbers are finite, a section never changes once built. Every field says in its description what it is, its
unit and its special values.
"""

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Optimizer(Section):
    """Adam and its learning rate; the part that [policy] and [value] share."""

    lr: float = Field(gt=0, description="peak learning rate; constant after its warm-up")
    lr_warmup_steps: int = Field(0, ge=0, description="updates over which lr rises linearly from 0; 0 = none")
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam: decay of the gradient's mean")
    beta2: float = Field(0.98, ge=0, lt=1, description="Adam: decay of the squared gradient's mean")
    adam_eps: float = Field(1e-8, gt=0, description="Adam: added to the denominator")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay; norms and biases are exempt")
    clip_grad: float = Field(1.0, ge=0, description="largest gradient norm; 0 = no clipping")
