"""[task]: the environment and where its prompts come from."""

from typing import Any, Literal

from pydantic import Field, field_validator

from megatron_sao.config.section import Section


class Task(Section):
    environment: str = Field("calculator", min_length=1, description="name in the registry of environments")
    params: dict[str, Any] = Field(
        default_factory=dict, description="handed to the environment, which checks them; the one open table"
    )
    prompts_file: str = Field("", description="JSONL file of training prompts; empty = the environment makes them")
    on_bad_line: Literal["error", "skip"] = Field("error", description="a malformed line: stop, or skip and count it")
    num_train_prompts: int = Field(0, ge=0, description="different training prompts; 0 = as many as there are")
    num_eval_prompts: int = Field(256, ge=1, description="held-out prompts of one evaluation")
    reward_key: str = Field(
        "", description="entry to use where an environment's reward is a table; empty = it is a number"
    )

    @field_validator("params")
    @classmethod
    def _params_are_json(cls, params: dict[str, Any]) -> dict[str, Any]:
        """They travel to other processes as JSON: text, numbers, booleans, lists and tables only."""
        _refuse_non_json(params, "")
        return params


def _refuse_non_json(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, entry in value.items():
            _refuse_non_json(entry, f"{where}.{key}")
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            _refuse_non_json(entry, f"{where}[{index}]")
    elif isinstance(value, float) and value - value != 0.0:  # inf - inf and nan - nan are NaN
        raise ValueError(f"must hold finite numbers only, entry {where.lstrip('.')} is {value}")
    elif not isinstance(value, str | int | float):  # bool is an int
        kind = type(value).__name__
        raise ValueError(
            f"must hold text, numbers, true / false, lists and tables, entry {where.lstrip('.')} is a {kind}"
        )
