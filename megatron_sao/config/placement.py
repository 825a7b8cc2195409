"""[placement]: which nodes and GPUs hold the trainer and which the engines.

Numbers are given for both or for neither (0 = not said: everything on one machine, as the local run). One trainer GPU
holds one rank and one rollout GPU one engine worker; on nodes without GPUs the numbers count those processes. Rank r
lies on trainer node r // trainer_gpus_per_node, worker w on rollout node w // rollout_gpus_per_node. That the numbers
fit [parallel] and [engine] is checked in check.py; nodes.py says which ranks meet on which node.
"""

from typing import Literal

from pydantic import Field

from megatron_sao.config.section import Section


class Placement(Section):
    mode: Literal["separate", "colocated"] = Field(
        "separate",
        description="engines on GPUs of their own, or on the trainer's, asleep while it works (planned only)",
    )
    value_model: Literal["with_policy", "own_ranks"] = Field(
        "with_policy",
        description="on the policy's ranks, in turns with it, or on as many further ones (planned only)",
    )
    trainer_nodes: int = Field(0, ge=0, description="nodes of the trainer; 0 = not said")
    trainer_gpus_per_node: int = Field(0, ge=0, description="GPUs, so ranks, on each of them; 0 = not said")
    rollout_nodes: int = Field(0, ge=0, description="nodes of the engines; 0 = not said, or mode colocated")
    rollout_gpus_per_node: int = Field(
        0, ge=0, description="GPUs, so engine workers, on each of them; 0 = not said, or mode colocated"
    )
    trainer_gpu_gib: float = Field(80.0, gt=0, description="memory of one trainer GPU in GiB: what the plan must fit")
    rollout_gpu_gib: float = Field(80.0, gt=0, description="memory of one rollout GPU in GiB: what the plan must fit")

    @property
    def is_said(self) -> bool:
        """Whether nodes were given."""
        return self.trainer_nodes > 0

    @property
    def trainer_gpus(self) -> int:
        """Of all trainer nodes; 0 = not said."""
        return self.trainer_nodes * self.trainer_gpus_per_node

    @property
    def rollout_gpus(self) -> int:
        """Of all nodes with engines; 0 = not said."""
        return self.trainer_gpus if self.mode == "colocated" else self.rollout_nodes * self.rollout_gpus_per_node
