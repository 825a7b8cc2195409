"""[policy]: the policy's optimizer."""

from pydantic import Field

from megatron_sao.config.section import Optimizer


class Policy(Optimizer):
    lr: float = Field(1e-6, gt=0, description="peak learning rate; constant after its warm-up")
