"""[parallel]: how the trainer's ranks share a model.

world = tp * pp * cp * dp. Experts are laid out over the same ranks: etp * ep of them hold one copy of the experts
of a stage, so etp * ep divides tp * cp * dp. Sequence parallelism is on whenever tp > 1 (Megatron demands it for
experts). With vpp > 1 every pipeline stage holds vpp chunks of consecutive layers that it visits in turn (interleaved
schedule: a smaller bubble for more messages).
"""

from typing import Literal

from pydantic import Field

from megatron_sao.config.section import Section


class Parallel(Section):
    tp: int = Field(1, ge=1, description="tensor parallel: ranks that share each layer's matrices")
    pp: int = Field(1, ge=1, description="pipeline parallel: stages of consecutive layers")
    cp: int = Field(1, ge=1, description="context parallel: ranks that share each sequence")
    ep: int = Field(1, ge=1, description="expert parallel: ranks that share the experts of a layer")
    etp: int = Field(1, ge=1, description="expert tensor parallel: ranks that share each expert's matrices")
    dp: int = Field(1, ge=1, description="data parallel: copies of the model")
    vpp: int = Field(1, ge=1, description="virtual pipeline: chunks of layers on each stage, visited in turn")
    first_stage_layers: int = Field(0, ge=0, description="layers of the first stage; 0 = as many as the others")
    last_stage_layers: int = Field(0, ge=0, description="layers of the last stage; 0 = as many as the others")
    expert_dispatcher: Literal["alltoall", "allgather"] = Field(
        "alltoall", description="how tokens travel to their experts; allgather pays for few experts per rank"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="what backward computes again, not keeps: nothing, core attention, whole layers (but MTP's)"
    )
    sparse_attention_kernel: Literal["none", "tilelang", "cudnn"] = Field(
        "none", description="Megatron's fused kernels for sparse attention (GLM-5); none = plain PyTorch"
    )
    offload_sleeping_model: bool = Field(
        False, description="keep the model that is not at work, with its optimizer state, in host memory"
    )
    micro_batch_tokens: int = Field(8192, ge=2, description="tokens of one packed micro-batch, all cp ranks together")
    timeout_s: float = Field(300.0, gt=0, description="time one collective may take")
    lost_after_s: float = Field(
        30.0, ge=6, description="silence of a trainer host after which it counts as gone, and the run ends"
    )
    join_timeout_s: float = Field(
        900.0, ge=1, description="time the hosts of the trainer have to find each other, and its ranks to begin"
    )
    start_timeout_s: float = Field(
        900.0,
        gt=0,
        description="time the trainer has to load the model and greet the scheduler, once the engines answer; reading a"
        " checkpoint may take checkpoint.timeout_s more",
    )
    interface: str = Field(
        "", description="network interface of gloo and NCCL on each trainer host; empty = the one that reaches host 0"
    )

    @property
    def world_size(self) -> int:
        """Ranks of the trainer."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def expert_dp(self) -> int:
        """Copies of each expert."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)
