"""The experiments that `algo.arm` can name, as the values each stands for.

Naming an arm sets its values. A value written beside it in the same place (the file, or the command line) must
agree: an arm never silently changes what was written, and is never silently something else than its name says. An
arm on the command line overrides the file.
"""

from typing import Any

_SAO = {"algo.loss": "dis", "algo.baseline": "value", "sampling.rollouts_per_prompt": 1}
_ALL_VALUE_PARAMETERS = {f"value.groups.{group}.trained": True for group in ("attention", "norms", "embeddings")}

ARMS: dict[str, dict[str, Any]] = {
    "sao": _SAO,
    # --- SAO with one part taken out
    "sao_k1": _SAO | {"value.updates_per_step": 1},
    "sao_all_value_parameters": _SAO | _ALL_VALUE_PARAMETERS,
    "sao_plain_gae": _SAO | {"algo.gae": "plain"},
    "sao_one_sided": _SAO | {"algo.loss": "one_sided"},
    # the policy loss alone: an ordinary value model, without faster updates and frozen attention
    "sao_dis_only": _SAO | {"value.updates_per_step": 1} | _ALL_VALUE_PARAMETERS,
    "sao_no_pretraining": _SAO | {"value.pretrain_trajectories": 0},
    "sao_step_average": _SAO | {"algo.action_level": "turn_average"},
    "sao_step_last": _SAO | {"algo.action_level": "turn_last"},
    # --- controls
    "grpo": {"algo.loss": "ppo_clip", "algo.baseline": "group", "sampling.rollouts_per_prompt": 8},
    "grpo_dis": {"algo.loss": "dis", "algo.baseline": "group", "sampling.rollouts_per_prompt": 8},
    "vapo": {"algo.loss": "ppo_clip", "algo.baseline": "value", "sampling.rollouts_per_prompt": 1},
    "running_mean": {"algo.loss": "dis", "algo.baseline": "running_mean", "sampling.rollouts_per_prompt": 1},
}
