"""How the work on a trajectory grows with its length, from a HF `config.json` alone."""

from math import prod
from typing import Any

from megatron_sao.convert.expected import expected_tensors
from megatron_sao.convert.family import read_shape, required
from megatron_sao.data.balance import Cost


def trajectory_cost(hf_config: dict[str, Any]) -> Cost:
    """Multiply-adds of one forward pass over a trajectory of T tokens; a backward pass is a multiple of the same.

    per_token = weights of all matrices that a token passes: of the routed experts the chosen ones, of the embedding
    none (it is looked up).
    per_pair = layers * heads * (size of a query + size of a value) / 2: a score and a weighted value for each pair of
    a token and one before it; of T^2 pairs, half are causal. Sparse attention counts as if it were dense.
    Raises: CheckpointError as `read_shape`.
    """
    shape = read_shape(hf_config)
    chosen = required(hf_config, "num_experts_per_tok") / shape.num_experts if shape.num_experts else 0.0
    per_token = 0.0
    for name, size in expected_tensors(hf_config).items():
        if len(size) == 2 and (shape.is_tied or not name.endswith("embed_tokens.weight")):  # a tied one is the head too
            per_token += prod(size) * (chosen if ".experts." in name else 1.0)
    value_dim = shape.mla.v_dim if shape.mla else shape.head_dim
    return Cost(per_token=per_token, per_pair=shape.num_layers * shape.num_heads * (shape.head_dim + value_dim) / 2)
