"""Builds policy and value models from a HF `config.json`: the same decoder, another output layer.

Each model gets a TransformerConfig of its own: Megatron hangs hooks of the optimizer on it, and two models that shared
one would steal each other's.
"""

from typing import Any, Literal

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_sao.config.parallel import Parallel
from megatron_sao.convert.family import ModelShape, Rope, check_stage_starts, read_rope, read_shape, required
from megatron_sao.errors import CheckpointError
from megatron_sao.models.dsa import DSAConfig, dsa_options
from megatron_sao.models.expert_dispatch import use_packed_dispatcher
from megatron_sao.models.mtp import PolicyWithMTP
from megatron_sao.models.specs import decoder_spec, mtp_spec, uses_transformer_engine
from megatron_sao.models.value_head import ValueHead
from megatron_sao.parallel.schedule import is_first_stage, is_last_stage

Role = Literal["policy", "value"]


class ValueModel(GPTModel):
    """GPTModel whose output layer is a `ValueHead`; its "logits" are values float32 [1, S, num_outputs]."""

    def __init__(self, config, *args, num_outputs: int = 1, **kwargs):
        super().__init__(config, *args, **kwargs)
        if self.post_process:
            del self.output_layer
            self.output_layer = ValueHead(config, num_outputs, self.pg_collection.tp)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        # GPTModel's version reaches into extra state that a value head has not.
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)


def transformer_config(
    hf_config: dict[str, Any], parallel: Parallel, dtype: torch.dtype, *, with_mtp: bool = False
) -> TransformerConfig:
    """Megatron's configuration of a HF model under the given layout.

    Raises: CheckpointError as `read_shape`, or `with_mtp` for a model that has not exactly one MTP layer; ConfigError
        as `check_stage_starts`.
    """
    shape = read_shape(hf_config)
    on_gpu = uses_transformer_engine(dtype)
    families = _attention(shape, read_rope(hf_config))
    # What a dense model has no use for must still be named: Megatron's default refuses packed micro-batches.
    dispatcher = parallel.expert_dispatcher if shape.num_experts else "alltoall"
    if shape.num_experts:
        families |= _experts(shape, hf_config, on_gpu)
    if with_mtp:
        if shape.num_mtp_layers != 1:
            raise CheckpointError(
                f"config.json counts {shape.num_mtp_layers} MTP layers; training them (policy.mtp_loss_weight > 0) is"
                " built for 1: set policy.mtp_loss_weight = 0"
            )
        families |= dict(mtp_num_layers=1, mtp_detach_heads=True)
    kind = MLATransformerConfig if shape.mla else TransformerConfig
    check_stage_starts(shape, parallel)
    if shape.indexer:
        kind = DSAConfig
        families |= dsa_options(shape.indexer, parallel.sparse_attention_kernel if on_gpu else "none")
    config = kind(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.num_heads,
        ffn_hidden_size=shape.ffn,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=required(hf_config, "rms_norm_eps"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.tp > 1,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers or None,
        num_layers_in_last_pipeline_stage=parallel.last_stage_layers or None,
        # megatron-core 0.19: two interleaved stages mix up batched messages, silently where lengths are equal.
        overlap_p2p_comm=parallel.vpp > 1,
        batch_p2p_comm=parallel.vpp == 1,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        variable_seq_lengths=dispatcher != "allgather",  # see below
        moe_token_dispatcher_type=dispatcher,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=not on_gpu,
        # Sums, not means: the loss is divided by the action tokens of the whole step already (parallel/schedule.py).
        calculate_per_token_loss=True,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=on_gpu,
        apply_rope_fusion=on_gpu and not shape.mla,  # MLA's fused kernels know YaRN only
        persist_layer_norm=on_gpu,
        gradient_accumulation_fusion=False,
        **_RECOMPUTE[parallel.recompute],
        **families,
    )
    # Packed micro-batches differ in length. Set late: Megatron refuses it with its own all-gather dispatcher, in whose
    # place models/expert_dispatch.py puts one that allows it.
    config.variable_seq_lengths = True
    return config


_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
    "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
}


def _attention(shape: ModelShape, rope: Rope) -> dict[str, Any]:
    """Flags of grouped-query attention, or of multi-head latent attention."""
    if shape.mla is None:
        return dict(
            num_query_groups=shape.num_kv_groups,
            kv_channels=shape.head_dim,
            add_qkv_bias=shape.has_qkv_bias,
            qk_layernorm=shape.has_qk_norm,
        )
    flags = dict(
        multi_latent_attention=True,
        kv_channels=shape.head_dim,
        q_lora_rank=shape.mla.q_rank,
        kv_lora_rank=shape.mla.kv_rank,
        qk_head_dim=shape.mla.nope_dim,
        qk_pos_emb_head_dim=shape.mla.rope_dim,
        v_head_dim=shape.mla.v_dim,
        # The norms of the latents. Their epsilon is rms_norm_eps, as in vLLM, which serves what is trained here;
        # transformers has 1e-6 there whatever config.json says.
        qk_layernorm=True,
        rope_type="yarn" if rope.yarn else "rope",
        rotary_base=rope.base,
        # Megatron also scales the softmax by these: a factor of 1 is none.
        rotary_scaling_factor=1.0,
    )
    if rope.yarn:
        flags |= dict(
            rotary_scaling_factor=rope.yarn.factor,
            original_max_position_embeddings=rope.yarn.original_positions,
            beta_fast=rope.yarn.beta_fast,
            beta_slow=rope.yarn.beta_slow,
            mscale=rope.yarn.mscale,
            mscale_all_dim=rope.yarn.mscale_all_dim,
        )
    return flags


def _experts(shape: ModelShape, hf_config: dict[str, Any], on_gpu: bool) -> dict[str, Any]:
    """Flags of the experts and their router: softmax (Qwen3), or sigmoid with a selection bias (GLM, DeepSeek)."""
    flags = dict(
        num_moe_experts=shape.num_experts,
        moe_ffn_hidden_size=shape.expert_ffn,
        moe_layer_freq=[int(not shape.is_dense(layer)) for layer in range(shape.num_layers)],
        moe_router_topk=required(hf_config, "num_experts_per_tok"),
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",  # reinforcement learning adds no balancing loss
        moe_aux_loss_coeff=0.0,
        moe_grouped_gemm=on_gpu,
        moe_permute_fusion=on_gpu,
    )
    if not shape.has_router_bias:
        # renormalised = softmax over the chosen ones
        return flags | dict(moe_router_pre_softmax=not required(hf_config, "norm_topk_prob"))
    flags |= dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.0,  # the bias is a weight of the folder: no step changes it
        moe_router_topk_scaling_factor=required(hf_config, "routed_scaling_factor"),
        moe_shared_expert_intermediate_size=shape.num_shared * shape.expert_ffn,
    )
    groups, chosen = hf_config.get("n_group") or 1, hf_config.get("topk_group") or 1
    if chosen < groups:
        flags |= dict(moe_router_num_groups=groups, moe_router_group_topk=chosen)
    return flags


def build_model(
    role: Role,
    hf_config: dict[str, Any],
    parallel: Parallel,
    dtype: torch.dtype,
    num_value_outputs: int = 1,
    *,
    with_mtp: bool = False,
) -> list[MegatronModule]:
    """The chunks of this rank's pipeline stage, in the order of their layers.

    One, or `parallel.vpp` of them, of which only the first stage's first takes token ids and only the last stage's
    last gives outputs. Weights are random until loaded, the value head is zero.

    Args:
        num_value_outputs: outputs of the value head: 1, or the number of bins of a categorical value.
        with_mtp: build the policy's multi-token-prediction layer too (models/mtp.py).
    Raises: CheckpointError as `transformer_config`.
    Collective: every rank of the world (with MTP, first and last stage make their embeddings equal).
    """
    config = transformer_config(hf_config, parallel, dtype, with_mtp=with_mtp)
    numbers = [None] if parallel.vpp == 1 else range(parallel.vpp)
    chunks = [_build_chunk(role, hf_config, config, number, num_value_outputs) for number in numbers]
    return [chunk.cuda() for chunk in chunks] if torch.cuda.is_available() else chunks


def _build_chunk(
    role: Role, hf_config: dict[str, Any], config: TransformerConfig, vp_stage: int | None, num_value_outputs: int
) -> MegatronModule:
    shape, rope = read_shape(hf_config), read_rope(hf_config)
    tp, vpp = config.tensor_model_parallel_size, config.virtual_pipeline_model_parallel_size
    decoder = decoder_spec(config, vp_stage)
    options = dict(
        transformer_layer_spec=decoder,
        vocab_size=-(-shape.vocab // tp) * tp,
        max_sequence_length=required(hf_config, "max_position_embeddings"),
        pre_process=is_first_stage() and vp_stage in (None, 0),
        post_process=is_last_stage() and (vp_stage is None or vp_stage == vpp - 1),
        position_embedding_type="rope",
        rotary_percent=rope.share,
        rotary_base=rope.base,
        parallel_output=True,
        vp_stage=vp_stage,
    )
    if role == "value":
        chunk = ValueModel(
            config, **options, share_embeddings_and_output_weights=False, num_outputs=num_value_outputs
        )
    else:
        kind = PolicyWithMTP if config.mtp_num_layers else GPTModel
        options["mtp_block_spec"] = mtp_spec(config, decoder, vp_stage)
        chunk = kind(config, **options, share_embeddings_and_output_weights=shape.is_tied)
    for module in chunk.modules():
        if isinstance(module, Router):
            module.frozen_expert_bias = True  # Megatron would exchange counts of tokens every step to add nothing
    if config.recompute_granularity == "full" and chunk.pre_process:
        chunk.embedding.register_forward_hook(_require_grad)
    use_packed_dispatcher(chunk)
    return chunk


def _require_grad(embedding, args, output: torch.Tensor) -> None:
    """megatron-core 0.19: a recomputed layer whose input needs no gradient gives none to its weights, and its output
    needs none either: above frozen embeddings a fully recomputed model would silently learn nothing but its head."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()
