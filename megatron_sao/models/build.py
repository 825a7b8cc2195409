"""Builds policy and value models from a HF `config.json`: the same decoder, another output layer.

Each model gets a TransformerConfig of its own: Megatron hangs hooks of the optimizer on it, and two models that shared
one would steal each other's.
"""

from typing import Any, Literal

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sao.config.parallel import Parallel
from megatron_sao.convert.family import read_shape, required, rope_base
from megatron_sao.models.specs import decoder_spec, uses_transformer_engine
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


def transformer_config(hf_config: dict[str, Any], parallel: Parallel, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's configuration of a HF model under the given layout. Raises: CheckpointError as `read_shape`."""
    shape = read_shape(hf_config)
    on_gpu = uses_transformer_engine()
    moe = {}
    if shape.num_experts:
        moe = dict(
            num_moe_experts=shape.num_experts,
            moe_ffn_hidden_size=required(hf_config, "moe_intermediate_size"),
            moe_router_topk=required(hf_config, "num_experts_per_tok"),
            # renormalised = softmax over the chosen ones
            moe_router_pre_softmax=not required(hf_config, "norm_topk_prob"),
            moe_router_dtype="fp32",
            moe_router_load_balancing_type="none",  # reinforcement learning adds no balancing loss
            moe_aux_loss_coeff=0.0,
            moe_grouped_gemm=on_gpu,
            moe_permute_fusion=on_gpu,
        )
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=required(hf_config, "intermediate_size"),
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=required(hf_config, "rms_norm_eps"),
        qk_layernorm=shape.family.startswith("qwen3"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.tp > 1,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        variable_seq_lengths=True,  # packed micro-batches differ in length
        moe_token_dispatcher_type="alltoall",  # the other kinds refuse that, even for a dense model
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=not on_gpu,
        # Sums, not means: the loss is divided by the action tokens of the whole step already (parallel/schedule.py).
        calculate_per_token_loss=True,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=on_gpu,
        apply_rope_fusion=on_gpu,
        persist_layer_norm=on_gpu,
        gradient_accumulation_fusion=False,
        **moe,
    )


def build_model(
    role: Role, hf_config: dict[str, Any], parallel: Parallel, dtype: torch.dtype, num_value_outputs: int = 1
) -> list[MegatronModule]:
    """The chunks of this rank's pipeline stage (one; weights are random until loaded, the value head is zero).

    Args:
        num_value_outputs: outputs of the value head: 1, or the number of bins of a categorical value.
    Collective: none, but the groups must be initialised.
    """
    config = transformer_config(hf_config, parallel, dtype)
    shape = read_shape(hf_config)
    options = dict(
        transformer_layer_spec=decoder_spec(config),
        vocab_size=-(-shape.vocab // parallel.tp) * parallel.tp,
        max_sequence_length=required(hf_config, "max_position_embeddings"),
        pre_process=is_first_stage(),
        post_process=is_last_stage(),
        position_embedding_type="rope",
        rotary_base=rope_base(hf_config),
        parallel_output=True,
    )
    if role == "value":
        model = ValueModel(
            config, **options, share_embeddings_and_output_weights=False, num_outputs=num_value_outputs
        )
    else:
        model = GPTModel(config, **options, share_embeddings_and_output_weights=shape.is_tied)
    return [model.cuda()] if torch.cuda.is_available() else [model]
