"""DeepSeek sparse attention as GLM-5 has it: an indexer chooses for each token the earlier ones it may attend to.

A layer either has an indexer of its own or takes the choice of the nearest layer before it that has one. Invariants:
- The choice travels from layer to layer on the micro-batch's `PackedSeqParams`, a fresh one for each micro-batch; so
  recomputation in the backward pass finds its own micro-batch's choice. It does not cross pipeline stages.
- The indexer learns nothing here. Choosing passes no gradient, and its training loss (a KL divergence to the attention
  it serves) is off: to an optimizer its parameters would be gradients that never come. They are built frozen, in the
  policy as in the value model, keep the folder's values and are exported and pushed as they came.
- The norms of the latents use the model's `rms_norm_eps`, as Megatron and vLLM do. transformers 5.19 uses 1e-6 there
  whatever the config says (GLM-5's says 1e-5); what the engine serves is what we train.

Memory, besides what MLA keeps: where layers share, each choice, int64 [S, index_topk], lives until the backward pass of
its micro-batch is over. Attention itself is Megatron's plain PyTorch path, with scores float32 [heads/tp, S, S] and the
indexer's [S, index_n_heads, S], unless `parallel.sparse_attention_kernel` names its fused kernels; what those do not
take goes the plain way without a word above Megatron's debug log.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_layer_with_experimental_attention_variant_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_sao.convert.family import IndexerShape
from megatron_sao.models.cpu_modules import RMSNorm
from megatron_sao.models.mla import AbsorbedLatentAttention, LocalBackend


@dataclass
class DSAConfig(MLATransformerConfig):
    """Megatron's configuration with the one thing it cannot say: which layers have an indexer, one by one."""

    has_indexer: tuple[bool, ...] = ()  # per decoder layer; the first is True


def dsa_options(indexer: IndexerShape, kernel: str) -> dict[str, Any]:
    """The fields of `DSAConfig` beyond those of multi-latent attention.

    Args: kernel: Megatron's name of the fused kernels; it refuses any but "none" where CUDA or their packages lack.
    """
    return dict(
        has_indexer=indexer.is_full,
        experimental_attention_variant="dsa",
        dsa_indexer_n_heads=indexer.num_heads,
        dsa_indexer_head_dim=indexer.head_dim,
        dsa_indexer_topk=indexer.topk,
        dsa_indexer_rope_interleaved=True,
        dsa_indexer_rotate_activation=False,  # a Hadamard transform: DeepSeek-V3.2 has it, GLM-5 has not
        dsa_indexer_k_norm_epsilon=1e-6,  # fixed in the model, no field of config.json
        dsa_indexer_loss_coeff=0.0,
        dsa_kernel_backend=kernel,
        cp_comm_type="allgather",  # the only kind that Megatron's sparse attention knows
    )


class IndexSharingAttention(DSAttention):
    """Megatron's sparse attention with sharing by `DSAConfig.has_indexer`, where its own knows a regular period only.

    megatron-core 0.19; can go when Megatron takes a list of layers.
    """

    def __init__(self, config: DSAConfig, submodules, layer_number: int, *args, is_alone: bool = False, **kwargs):
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        # A layer outside the decoder (MTP) counts from 1 again: it must not pass for the decoder's first layer.
        has_indexer = (True,) * layer_number if is_alone else config.has_indexer
        self.index_share = not all(has_indexer)
        self.skip_topk = not has_indexer[layer_number - 1]
        self.source_layer = max(n for n in range(1, layer_number + 1) if has_indexer[n - 1])
        if self.skip_topk:
            self.indexer = None
        else:
            self.indexer.requires_grad_(False)

    def _get_index_share_carrier(
        self, packed_seq_params: PackedSeqParams | None, attention_mask: torch.Tensor | None
    ) -> PackedSeqParams:
        # Megatron would fall back on its config, where the micro-batches in flight overwrite each other's choice.
        if packed_seq_params is None:
            raise ValueError("layers share their choice of tokens through PackedSeqParams: pass a fresh one")
        return packed_seq_params


def dsa_block_spec(
    config: DSAConfig, uses_transformer_engine: bool, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The block spec of this pipeline stage's decoder layers (of one of its chunks)."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = _layer_specs(config, uses_transformer_engine)
    return TransformerBlockSubmodules(
        layer_specs=layers[first : first + get_num_layers_to_build(config, vp_stage=vp_stage)],
        layer_norm=TENorm if uses_transformer_engine else RMSNorm,
    )


def dsa_mtp_layer_spec(config: DSAConfig, uses_transformer_engine: bool) -> ModuleSpec:
    """The spec of the decoder layer inside an MTP layer: the last layer's kind, with an indexer of its own."""
    spec = _layer_specs(config, uses_transformer_engine)[-1]
    spec.submodules.self_attention.submodules.core_attention.params = {"is_alone": True}
    return spec


def _layer_specs(config: DSAConfig, uses_transformer_engine: bool) -> list[ModuleSpec]:
    """The specs of all decoder layers, in order."""
    specs = get_transformer_layer_with_experimental_attention_variant_spec(
        config, backend=None if uses_transformer_engine else LocalBackend()
    )
    for spec in specs:
        attention = spec.submodules.self_attention
        attention.submodules.core_attention.module = IndexSharingAttention
        if not uses_transformer_engine:
            attention.module = AbsorbedLatentAttention
            # Only passes Megatron's check: AbsorbedLatentAttention replaces them.
            attention.submodules.linear_q_down_proj = ColumnParallelLinear
            attention.submodules.linear_kv_down_proj = ColumnParallelLinear
    return specs

