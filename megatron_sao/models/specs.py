"""Which modules a decoder is made of: transformer-engine where CUDA is present, ours otherwise. One function.

A float32 model is made of ours on a GPU too: transformer-engine has no packed attention for 32 bits.
"""

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sao.models.cpu_modules import PackedAttention, RMSNorm
from megatron_sao.models.dsa import DSAConfig, dsa_block_spec, dsa_mtp_layer_spec
from megatron_sao.models.mla import LatentAttention


def uses_transformer_engine(dtype: torch.dtype) -> bool:
    """Whether models of this number format are made of transformer-engine's modules."""
    return torch.cuda.is_available() and dtype is not torch.float32


def decoder_spec(config: TransformerConfig, vp_stage: int | None = None):
    """The block spec of this pipeline stage's decoder layers."""
    if isinstance(config, DSAConfig):
        return dsa_block_spec(config, uses_transformer_engine(config.params_dtype), vp_stage)
    if uses_transformer_engine(config.params_dtype):
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.multi_latent_attention:
            parts.self_attention.module = LatentAttention
            attention.q_layernorm = attention.kv_layernorm = RMSNorm
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    spec.layer_norm = RMSNorm
    return spec


def mtp_spec(config: TransformerConfig, decoder, vp_stage: int | None = None):
    """The spec of the multi-token-prediction layers; None where this chunk has none (they live on the last stage).

    Args:
        decoder: the block spec of the same chunk, of whose last layer's kind they are.
    """
    if not config.mtp_num_layers:
        return None
    if isinstance(config, DSAConfig):
        decoder = dsa_mtp_layer_spec(config, uses_transformer_engine(config.params_dtype))
    spec = get_gpt_mtp_block_spec(
        config, decoder, use_transformer_engine=uses_transformer_engine(config.params_dtype), vp_stage=vp_stage
    )
    if spec is not None and not uses_transformer_engine(config.params_dtype):
        for layer in spec.layer_specs:
            layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = RMSNorm
    return spec
