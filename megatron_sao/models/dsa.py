"""DeepSeek sparse attention as GLM-5 has it: an indexer chooses for each token the earlier ones it may attend to.

A layer either has an indexer of its own or takes the choice of the nearest layer before it that has one. Invariants:
- The choice travels from layer to layer on the micro-batch's `PackedSeqParams`, a fresh one for each micro-batch; so
  recomputation in the backward pass finds its own micro-batch's choice. It does not cross pipeline stages.
- The indexer learns nothing here. Choosing passes no gradient, and its training loss (a KL divergence to the attention
  it serves) is off: for an optimizer its parameters would be gradients that never come. They are built frozen, in the
  policy as in the value model, keep the folder's values and are exported and pushed as they came.
- The norms of the latents use the model's `rms_norm_eps`, as Megatron and vLLM do. transformers 5.19 uses 1e-6 there
  whatever the config says; what the engine serves is what we train.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_layer_with_experimental_attention_variant_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_sao.convert.family import required
from megatron_sao.models.mla import AbsorbedLatentAttention, LocalBackend


@dataclass
class DSAConfig(MLATransformerConfig):
    """Megatron's configuration with the one thing it cannot say: which layers have an indexer, one by one."""

    has_indexer: tuple[bool, ...] = ()  # per decoder layer; the first is True


def dsa_options(hf_config: dict[str, Any], has_indexer: tuple[bool, ...]) -> dict[str, Any]:
    """The fields of `DSAConfig` that multi-latent attention does not have.

    Args:
        has_indexer: per decoder layer.
    Raises: CheckpointError for a missing field.
    """
    return dict(
        has_indexer=has_indexer,
        experimental_attention_variant="dsa",
        dsa_indexer_n_heads=required(hf_config, "index_n_heads"),
        dsa_indexer_head_dim=required(hf_config, "index_head_dim"),
        dsa_indexer_topk=required(hf_config, "index_topk"),
        dsa_indexer_rope_interleaved=True,
        dsa_indexer_rotate_activation=False,  # a Hadamard transform: DeepSeek-V3.2 has it, GLM-5 has not
        dsa_indexer_k_norm_epsilon=1e-6,  # fixed in the model, no field of config.json
        dsa_indexer_loss_coeff=0.0,
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


def dsa_layer_specs(config: DSAConfig, uses_transformer_engine: bool) -> list[ModuleSpec]:
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


def dsa_mtp_layer_spec(config: DSAConfig, uses_transformer_engine: bool) -> ModuleSpec:
    """The spec of the decoder layer inside an MTP layer: the last layer's kind, with an indexer of its own."""
    spec = dsa_layer_specs(config, uses_transformer_engine)[-1]
    spec.submodules.self_attention.submodules.core_attention.params = {"is_alone": True}
    return spec
