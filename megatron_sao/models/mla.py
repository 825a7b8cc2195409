"""Parts of multi-latent attention without transformer-engine.

The down projections are whole on every tensor rank, as transformer-engine has them, so one weight table serves both.
megatron-core 0.19 offers only `ColumnParallelLinear` where transformer-engine is absent, and that is wrong under tensor
parallelism: each rank's heads give a part of the gradient of the shared rotary key, and the parts are never summed.
"""

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_sao.models.cpu_modules import RMSNorm


class ReplicatedLinear(torch.nn.Linear):
    """A linear layer that every tensor rank holds whole; like all of Megatron's it returns (output, no bias).

    Under sequence parallelism a rank sees only its own rows: the mark makes Megatron sum the ranks' gradients.
    """

    def __init__(self, input_size: int, output_size: int, *, config, init_method, **_):
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(x), None


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm with Megatron's arguments."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class _ReplicatedDownProjections:
    """Puts whole down projections in place of the column-parallel ones that Megatron insists on building."""

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)

        def whole(num_outputs: int) -> ReplicatedLinear:
            return ReplicatedLinear(config.hidden_size, num_outputs, config=config, init_method=config.init_method)

        self.linear_q_down_proj = whole(config.q_lora_rank)
        self.linear_kv_down_proj = whole(config.kv_lora_rank + config.qk_pos_emb_head_dim)


class LatentAttention(_ReplicatedDownProjections, MLASelfAttention):
    """Multi-latent attention with whole down projections."""


class AbsorbedLatentAttention(_ReplicatedDownProjections, AbsorbedMLASelfAttention):
    """The form that attends in the latent space, with whole down projections."""


class LocalBackend(LocalSpecProvider):
    """Megatron's own layers, with our norms, and with the replicated linear layer that its provider lacks."""

    def linear(self) -> type:
        return ReplicatedLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return RMSNorm if rms_norm else LayerNorm
