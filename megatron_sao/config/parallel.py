"""[parallel]: how the trainer's ranks share a model.

world = tp * pp * cp * dp. Experts are laid out over the same ranks: etp * ep of them hold one copy of the experts
of a stage, so etp * ep divides tp * cp * dp. Sequence parallelism is on whenever tp > 1 (Megatron demands it for
experts).
"""

from pydantic import Field

from megatron_sao.config.section import Section


class Parallel(Section):
    tp: int = Field(1, ge=1, description="tensor parallel: ranks that share each layer's matrices")
    pp: int = Field(1, ge=1, description="pipeline parallel: stages of consecutive layers")
    cp: int = Field(1, ge=1, description="context parallel: ranks that share each sequence")
    ep: int = Field(1, ge=1, description="expert parallel: ranks that share the experts of a layer")
    etp: int = Field(1, ge=1, description="expert tensor parallel: ranks that share each expert's matrices")
    dp: int = Field(1, ge=1, description="data parallel: copies of the model")
    micro_batch_tokens: int = Field(8192, ge=2, description="tokens of one packed micro-batch, all cp ranks together")
    timeout_s: float = Field(300.0, gt=0, description="time one collective may take")

    @property
    def world_size(self) -> int:
        """Ranks of the trainer."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def expert_dp(self) -> int:
        """Copies of each expert."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)
