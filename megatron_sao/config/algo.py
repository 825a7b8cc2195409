"""[algo]: what one step computes (the equations stand in megatron_sao/algo).

`arm` names a whole experiment; arms.py lists the values that each name stands for. The trainer reads only those
values, never the name.
"""

from typing import Any, Literal

from pydantic import Field, field_validator

from megatron_sao.config.arms import ARMS
from megatron_sao.config.section import Section


class Bounds(Section):
    """DIS keeps a token while 1 - eps_low < ratio < 1 + eps_high. Both are needed: neither has a symmetric fallback."""

    eps_low: float = Field(ge=0, lt=1, description="how far below 1 the ratio may fall")
    eps_high: float = Field(ge=0, description="how far above 1 the ratio may rise")


class DomainBounds(Section):
    """One pair for each domain that a prompt may have."""

    reasoning: Bounds = Bounds(eps_low=0.3, eps_high=5.0)
    coding: Bounds = Bounds(eps_low=0.8, eps_high=3.0)
    agentic: Bounds = Bounds(eps_low=0.8, eps_high=3.0)


class Algo(Section):
    arm: str = Field("sao", description="the experiment: SAO, one of its ablations or a control; see config/arms.py")
    loss: Literal["dis", "one_sided", "ppo_clip"] = Field("dis", description="policy loss")
    baseline: Literal["value", "group", "running_mean"] = Field(
        "value", description="what advantages are measured against"
    )
    gae: Literal["skip_observation", "plain"] = Field(
        "skip_observation", description="step over observation tokens, or take them for steps"
    )
    action_level: Literal["token", "turn_average", "turn_last"] = Field(
        "token", description="a value for each token, or one for each turn: average or last of its tokens"
    )
    gamma: float = Field(1.0, ge=0, le=1, description="discount of one action token")
    policy_lambda: Literal["length_adaptive"] | float = Field(
        "length_adaptive", description="lambda of the policy's advantages: a number, or 1 - 1 / (alpha * length)"
    )
    alpha: float = Field(1.5, gt=0, description="of the length-adaptive lambda")
    length_counts: Literal["action", "response"] = Field(
        "action", description="length = action tokens, or all tokens after the prompt"
    )
    value_lambda: float = Field(1.0, ge=0, le=1, description="lambda of the value targets; 1 = Monte-Carlo return")
    advantages_from: Literal["updated_values", "values_before"] = Field(
        "updated_values", description="values after, or before, the value updates of the step"
    )
    aggregation: Literal["token", "trajectory"] = Field(
        "token", description="mean over the action tokens of the step, or over trajectories of their means"
    )
    bootstrap_cut: bool = Field(False, description="a trajectory cut by a limit ends in V instead of 0")
    whiten: bool = Field(False, description="give the step's advantages mean 0 and deviation 1")
    ppo_clip_low: float = Field(0.2, ge=0, lt=1, description="loss ppo_clip only: lower clip distance")
    ppo_clip_high: float = Field(0.2, ge=0, description="loss ppo_clip only: upper clip distance")
    bounds: DomainBounds = DomainBounds()

    @field_validator("arm")
    @classmethod
    def _arm_is_known(cls, arm: str) -> str:
        if arm not in ARMS:
            raise ValueError(f"must be one of {', '.join(ARMS)}")
        return arm

    @field_validator("policy_lambda", mode="before")
    @classmethod
    def _lambda_is_a_share(cls, value: Any) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value == "length_adaptive" or (is_number and 0 <= value <= 1):
            return value
        raise ValueError("must be 'length_adaptive' or a number from 0 to 1")
