"""What one training step sends between ranks, and how long stages stand idle. Pure arithmetic.

Bytes are those that one rank receives (it sends as many), each collective counted as a ring would move it: of a tensor
of X bytes cut over n ranks, a gather or a reduce-scatter brings (n - 1) / n X. Letters as in plan_activations.py; T
stands for the tokens of a whole step on this rank, in place of S.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sao.models.plan_activations import FP32, is_moe_layer
from megatron_sao.models.plan_state import StateBytes

COLLECTIVES = {
    "tensor gather / reduce-scatter": "sequence parallel: before and after each sharded matrix, forward and backward",
    "expert all-to-all": "routed tokens to their experts and back, forward and backward",
    "pipeline send / receive": "b s H a chunk boundary, forward and backward",
    "context keys and values": "of the other cp ranks, forward and backward",
    "data gradients": "fp32 reduce-scatter, dense over dp * cp, experts over their copies",
    "data weights": "gather of the updated weights, in their own format",
    "weight push": "this rank's slices to the engines (sent, not received)",
}


@dataclass(frozen=True)
class Passes:
    """How often a step runs the model over its tokens."""

    forward: int  # passes without backward
    update: int  # passes with backward and an optimizer step
    recomputes: bool  # backward runs the forward pass once more

    @property
    def num_forward(self) -> int:
        """All forward passes, repeated ones included."""
        return self.forward + self.update * (2 if self.recomputes else 1)


@dataclass(frozen=True)
class StepShape:
    """What a step looks like to one data-parallel rank."""

    trajectories: int  # of this rank
    mean_tokens: int  # assumed length of one
    num_micro_batches: int

    @property
    def tokens(self) -> int:
        """Of this rank, all cp ranks together."""
        return self.trajectories * self.mean_tokens


def step_shape(
    batch_trajectories: int, dp: int, mean_tokens: int, micro_batch_tokens: int, *, multiple: int = 1
) -> StepShape:
    """Trajectories of one length, as many in a micro-batch as its budget holds (at least one).

    Args: multiple: micro-batches are filled up to a multiple of it (interleaved stages need one of their number).
    """
    mine = ceil(batch_trajectories / dp)
    num = ceil(mine / max(1, micro_batch_tokens // mean_tokens))
    return StepShape(mine, mean_tokens, -(-num // multiple) * multiple)


def bubble_fraction(num_stages: int, num_chunks: int, num_micro_batches: int) -> float:
    """Share of a pass in which a stage stands idle: (p - 1) / (v m + p - 1); v = 1 is 1F1B.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, as a share of the whole instead of the ideal time.
    """
    return (num_stages - 1) / (num_chunks * num_micro_batches + num_stages - 1)


def imbalance_fraction(layers: Sequence[int]) -> float:
    """Share of stage time lost because stages hold different numbers of layers and all wait for the longest."""
    return 1 - sum(layers) / (len(layers) * max(layers))


def stage_traffic(
    c: TransformerConfig,
    chunks: Sequence[range],
    state: StateBytes,
    *,
    stage: int,
    num_stages: int,
    step: StepShape,
    passes: Passes,
    itemsize: int,
    copies: tuple[int, int],
    trains_attention: bool,
) -> dict[str, float]:
    """Bytes by name (`COLLECTIVES`, the push left out) that one model of one rank receives in a step.

    Args:
        copies: ranks that share the optimizer state of dense parameters, and of experts.
    """
    tp, cp, b = c.tensor_model_parallel_size, c.context_parallel_size, itemsize
    T = step.tokens / cp
    found: Counter[str] = Counter()
    layers = [layer for chunk in chunks for layer in chunk]
    forward, updates = passes.num_forward, passes.update

    # A gather turns into a reduce-scatter in backward and the other way round; weight gradients gather once more.
    gathers = sum(_gathered_width(c, layer) for layer in layers)
    scatters = sum(_scattered_width(c, layer) for layer in layers)
    trained = sum(_gathered_width(c, layer, trains_attention) for layer in layers)
    ends = (c.hidden_size if stage == 0 else 0) + (c.hidden_size if stage == num_stages - 1 else 0)
    width = forward * (gathers + scatters + ends) + updates * (gathers + scatters + ends + trained)
    found["tensor gather / reduce-scatter"] = (tp - 1) / tp * b * T * width

    num_moe = sum(is_moe_layer(c, layer) for layer in layers)
    ep = c.expert_model_parallel_size
    if num_moe and c.moe_token_dispatcher_type == "allgather":
        ranks = ep * c.expert_tensor_parallel_size
        routed = (ranks - 1) * T / tp
    elif num_moe:
        routed = (ep - 1) / ep * T / tp * c.moe_router_topk * c.expert_tensor_parallel_size
    else:
        routed = 0.0
    found["expert all-to-all"] = 2 * num_moe * b * routed * c.hidden_size * (forward + updates)

    boundaries = 2 * len(chunks) - (stage == 0) - (stage == num_stages - 1) if num_stages > 1 else 0
    hidden = b * T / tp * c.hidden_size
    # forward comes in at one end of a chunk, backward at the other
    found["pipeline send / receive"] = boundaries / 2 * hidden * (passes.forward + 2 * updates)

    found["context keys and values"] = (cp - 1) * b * T * len(layers) * _key_value_width(c) * (forward + 2 * updates)
    dense, expert = copies
    for trained_elements, n in ((state.dense_buffer, dense), (state.expert_buffer, expert)):
        found["data gradients"] += updates * (n - 1) / n * FP32 * trained_elements
        found["data weights"] += updates * (n - 1) / n * b * trained_elements
    return dict(found)


def _gathered_width(c: TransformerConfig, layer: int, with_attention: bool = True) -> int:
    """Elements a token that a layer gathers over the tensor axis before its sharded matrices."""
    width = 0
    if with_attention:
        latents = (c.q_lora_rank or 0) + c.kv_lora_rank + c.qk_pos_emb_head_dim if c.multi_latent_attention else 0
        width += latents or c.hidden_size
    if not is_moe_layer(c, layer) or c.moe_shared_expert_intermediate_size:
        width += c.hidden_size
    return width


def _scattered_width(c: TransformerConfig, layer: int) -> int:
    """Elements a token that a layer reduces and scatters after them."""
    has_sharded_mlp = not is_moe_layer(c, layer) or bool(c.moe_shared_expert_intermediate_size)
    return c.hidden_size * (1 + has_sharded_mlp)


def _key_value_width(c: TransformerConfig) -> int:
    """Elements a token of keys and values, as they travel between cp ranks."""
    heads = c.num_attention_heads // c.tensor_model_parallel_size
    if c.experimental_attention_variant == "dsa":
        return c.kv_lora_rank + c.qk_pos_emb_head_dim + c.dsa_indexer_head_dim
    if c.multi_latent_attention:
        return heads * (c.qk_head_dim + c.qk_pos_emb_head_dim + c.v_head_dim)
    return 2 * max(1, c.num_query_groups // c.tensor_model_parallel_size) * c.kv_channels
