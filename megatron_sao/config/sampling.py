"""[sampling]: how the sampler writes tokens.

The learner scores tokens at the sampling temperature over the full vocabulary, so a sampler that cuts its support
(top_p < 1, top_k) gives ratios that are not 1 for equal weights: both fields exist to be refused with that reason.
"""

from pydantic import Field, field_validator

from megatron_sao.config.section import Section

_FULL_SUPPORT = (
    "the learner scores tokens over the full vocabulary, so a cut support makes importance ratios wrong even for equal"
    " weights"
)


class Sampling(Section):
    temperature: float = Field(1.0, gt=0, description="divides the logits, in the sampler and in the learner alike")
    top_p: float = Field(1.0, description="must be 1.0 (full support)")
    top_k: int = Field(0, description="must be 0 (full support)")
    max_tokens_per_turn: int = Field(32, ge=1, description="action tokens of one turn, at most")
    max_turns: int = Field(4, ge=1, description="turns of an episode, at most")
    max_trajectory_tokens: int = Field(
        128, ge=2, description="tokens of a trajectory, prompt and observations included"
    )
    rollouts_per_prompt: int = Field(1, ge=1, description="1 for SAO; a group of 2 or more for the GRPO arms")

    @field_validator("top_p")
    @classmethod
    def _no_top_p(cls, top_p: float) -> float:
        if top_p != 1.0:
            raise ValueError(f"must be 1.0: {_FULL_SUPPORT}")
        return top_p

    @field_validator("top_k")
    @classmethod
    def _no_top_k(cls, top_k: int) -> int:
        if top_k != 0:
            raise ValueError(f"must be 0: {_FULL_SUPPORT}")
        return top_k
