"""What backward needs of a forward pass, as a list of kept tensors: the activation memory of one rank.

Letters, per rank: S tokens of a micro-batch (already cut over cp), s = S / tp (sequence parallel), b bytes of a
number, H hidden, n and g query heads and KV groups (cut over tp), d their width, F inner width of a dense MLP or of
shared experts (cut over tp), r = s * top-k * etp routed tokens (balanced routing), f inner width of an expert (cut over
etp), E experts, V vocabulary (cut over tp). Every tensor is listed twice: as the CPU's modules keep it (checked against
the real process by tests/models/test_plan_activations.py) and as transformer-engine's with fused kernels should
(from their source, not measured). They differ in this:
  norms          the CPU keeps fp32 copies of input and normalised input, the GPU the input and one number a row;
  rotary         the CPU keeps cos and sin of each call, the fused kernel nothing;
  attention      the CPU lays the uncut segments on a padded grid (`grid` = N * longest / (S * cp)) and keeps q, k, v
                 before and after; flash attention keeps q, k, v, output and one number a row;
  gated MLPs     the CPU keeps gate and up apart after the activation, the fused kernel only what fc1 gave;
  permutation    indices, 8 bytes a number on the CPU, 4 on the GPU.
A frozen linear layer keeps no input, a frozen norm no normalised input: that is what freezing attention saves here.
Nothing is kept before the first trained parameter.

With pipeline stages several micro-batches are in flight (`chunks_in_flight`). Recompute: "selective" drops what core
attention keeps but for its inputs; "full" keeps b s H a layer and, while one layer is computed again, all it keeps.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sao.parallel.logprob import CHUNK_BYTES

Recompute = Literal["none", "selective", "full"]
Device = Literal["cpu", "gpu"]
FP32, INDEX = 4, 8  # bytes; torch indexes with int64


@dataclass(frozen=True)
class Kept:
    """One tensor (or a few of a kind) that autograd keeps of one layer for one micro-batch."""

    part: str  # "attention", "experts", ...
    what: str
    formula: str  # in the letters above; the first reading is the GPU's
    cpu: float  # bytes
    gpu: float
    is_core: bool = False  # inside core attention: "selective" computes it again

    def on(self, device: Device) -> float:
        """Bytes on one of the two."""
        return self.cpu if device == "cpu" else self.gpu


@dataclass(frozen=True)
class Work:
    """One micro-batch on one rank, and how it is computed."""

    tokens: int  # S
    itemsize: int  # b
    trained: Collection[str]  # parameter groups that learn (models/groups.py)
    grid: float = 1.0  # N * longest / (S * cp) of the CPU's attention; 1 = all segments equally long


# ---- what each part keeps --------------------------------------------------------------------------------------


def norm_kept(
    part: str, what: str, rows: float, width: int, work: Work, trained: bool, *, reads_view: bool = False
) -> list[Kept]:
    """A RMSNorm over `rows` rows. `reads_view`: its input is part of a tensor that is kept already."""
    copies = trained + (not reads_view or work.itemsize != FP32)  # from other formats the CPU copies into fp32
    cpu = rows * (copies * width * FP32 + FP32)
    return [Kept(part, f"input of the {what}", "rows (b width + 4)", cpu, rows * (width * work.itemsize + FP32))]


def attention_kept(c: TransformerConfig, work: Work) -> list[Kept]:
    """Attention of any kind with its input norm; its input needs a gradient or its weights are trained."""
    if c.experimental_attention_variant == "dsa":
        return sparse_attention_kept(c, work)
    return latent_attention_kept(c, work) if c.multi_latent_attention else grouped_attention_kept(c, work)


def grouped_attention_kept(c: TransformerConfig, work: Work) -> list[Kept]:
    """Grouped-query attention."""
    S, b, grid, part = work.tokens, work.itemsize, work.grid, "attention"
    s, hidden, d = S / c.tensor_model_parallel_size, c.hidden_size, c.kv_channels
    n = c.num_attention_heads // c.tensor_model_parallel_size
    g = max(1, c.num_query_groups // c.tensor_model_parallel_size)
    is_trained = "attention" in work.trained
    kept = norm_kept(part, "input norm", s, hidden, work, is_trained)
    if is_trained:
        kept.append(Kept(part, "input of the q, k, v projection", "b s H", b * s * hidden, b * s * hidden))
    projected = b * S * (n + 2 * g) * d
    kept.append(Kept(part, "q, k, v as projected (v is used from here)", "b S (n + 2g) d", projected, projected))
    if c.qk_layernorm:
        # The heads of a KV group lie side by side: with several groups q must be copied together.
        kept += norm_kept(part, "q norm", S * n, d, work, is_trained, reads_view=g == 1)
        kept += norm_kept(part, "k norm", S * g, d, work, is_trained, reads_view=True)
    turned = b * S * (n + g) * d
    kept.append(Kept(part, "q, k as turned by their positions", "b S (n + g) d", turned, turned))
    kept.append(Kept(part, "cos and sin", "0; CPU 4 b S d", 4 * b * S * d, 0))
    cp = c.context_parallel_size
    if cp > 1:
        gathered = 2 * b * S * cp * g * d
        kept.append(Kept(part, "k, v of all cp ranks", "0; CPU 2 b S cp g d", gathered, 0, is_core=True))
    gridded = grid * cp * b * S * (n + 2 * g) * d + INDEX * S
    kept.append(Kept(part, "q, k, v on the grid", "0; CPU grid cp b S (n + 2g) d + 8 S", gridded, 0, is_core=True))
    return kept + _core_output_kept(c, n, d, work)


def _latents_kept(c: TransformerConfig, work: Work) -> list[Kept]:
    """Down projections and norms of multi-latent attention."""
    S, b, part = work.tokens, work.itemsize, "attention"
    s, hidden = S / c.tensor_model_parallel_size, c.hidden_size
    is_trained = "attention" in work.trained
    kept = norm_kept(part, "input norm", s, hidden, work, is_trained)
    if is_trained:
        kept.append(Kept(part, "input of the down projections", "b s H", b * s * hidden, b * s * hidden))
    kept += norm_kept(part, "norm of the q latent", s, c.q_lora_rank, work, is_trained)
    kept += norm_kept(part, "norm of the kv latent", s, c.kv_lora_rank, work, is_trained)
    turned = 4 * b * S * c.qk_pos_emb_head_dim
    return [*kept, Kept(part, "cos and sin", "0; CPU 4 b S d_rope", turned, 0)]


def latent_attention_kept(c: TransformerConfig, work: Work) -> list[Kept]:
    """Multi-latent attention with keys and values of every head."""
    S, b, part = work.tokens, work.itemsize, "attention"
    s, n = S / c.tensor_model_parallel_size, c.num_attention_heads // c.tensor_model_parallel_size
    d = c.qk_head_dim + c.qk_pos_emb_head_dim
    kept = _latents_kept(c, work)
    if "attention" in work.trained:
        latents = b * s * (c.q_lora_rank + c.kv_lora_rank)
        kept.append(Kept(part, "inputs of the up projections", "b s (q rank + kv rank)", latents, latents))
    qkv = b * S * n * (2 * d + c.v_head_dim)
    kept.append(Kept(part, "q, k, v", "b S n (2 d + d_v)", qkv, qkv))
    cp = c.context_parallel_size
    if cp > 1:
        gathered = b * S * cp * n * (d + c.v_head_dim)
        kept.append(Kept(part, "k, v of all cp ranks", "0; CPU b S cp n (d + d_v)", gathered, 0, is_core=True))
    gridded = work.grid * cp * qkv + INDEX * S
    kept.append(Kept(part, "q, k, v on the grid", "0; CPU grid cp b S n (2 d + d_v) + 8 S", gridded, 0, is_core=True))
    return kept + _core_output_kept(c, n, c.v_head_dim, work)


def sparse_attention_kept(c: TransformerConfig, work: Work) -> list[Kept]:
    """Sparse attention in the latent space (DSA); keys are those of all cp ranks.

    The GPU's figures are those of a fused kernel. Without one Megatron falls back on the CPU's way, which keeps a row
    of scores over all keys for every head and token: out of the question for long sequences.
    """
    S, b, part = work.tokens, work.itemsize, "attention"
    s, n = S / c.tensor_model_parallel_size, c.num_attention_heads // c.tensor_model_parallel_size
    keys, latent = S * c.context_parallel_size, c.kv_lora_rank + c.qk_pos_emb_head_dim
    is_trained = "attention" in work.trained
    kept = _latents_kept(c, work)
    if is_trained:
        latents, q = b * s * c.q_lora_rank, b * S * n * (c.qk_head_dim + c.qk_pos_emb_head_dim)
        kept.append(Kept(part, "input of the q up projection", "b s (q rank)", latents, latents))
        kept.append(Kept(part, "q before it is absorbed", "b S n d", q, q))
    taken = b * latent * (S * n + keys)
    kept.append(Kept(part, "q and keys in the latent space", "b (S n + S cp) (kv rank + d_rope)", taken, taken))
    chosen, scores = FP32 * S * min(c.dsa_indexer_topk, keys), unfused_score_bytes(c, work)
    kept.append(Kept(part, "chosen tokens", "4 S topk; CPU scores 15 n S S cp", scores, chosen, is_core=True))
    out, statistics = b * S * n * c.kv_lora_rank, FP32 * S * n
    kept.append(Kept(part, "output in the latent space", "b S n (kv rank) + 4 S n", out * is_trained, out + statistics))
    if is_trained:
        values = b * S * n * c.v_head_dim
        kept.append(Kept(part, "input of the output projection", "b S n d_v", values, values))
    return kept


def _core_output_kept(c: TransformerConfig, n: int, width: int, work: Work) -> list[Kept]:
    """Output of core attention over n heads, and the input of the output projection (on a GPU the same tensor)."""
    part, out = "attention", work.itemsize * work.tokens * n * width
    is_trained = "attention" in work.trained
    statistics = FP32 * work.tokens * n
    kept = [
        Kept(
            part,
            "output of the core and its row statistics",
            "b S n d + 4 S n",
            work.grid * c.context_parallel_size * (out + statistics),
            (0 if is_trained else out) + statistics,
            is_core=True,
        )
    ]
    if is_trained:
        kept.append(Kept(part, "input of the output projection", "b S n d", out, out))
    return kept


def unfused_score_bytes(c: TransformerConfig, work: Work) -> float:
    """What one layer of sparse attention keeps of its scores without a fused kernel: 3 fp32 and 3 bool copies."""
    heads = c.num_attention_heads // c.tensor_model_parallel_size
    return heads * work.tokens * (15 * work.tokens * c.context_parallel_size + 9 * INDEX)


def choice_bytes(c: TransformerConfig, layer: int, work: Work) -> float:
    """The choice of tokens that layers share: it lives on the micro-batch until backward is over, recompute or not."""
    if c.experimental_attention_variant != "dsa" or all(c.has_indexer) or not c.has_indexer[layer]:
        return 0.0
    return INDEX * work.tokens * min(c.dsa_indexer_topk, work.tokens * c.context_parallel_size)


def dense_mlp_kept(c: TransformerConfig, work: Work, part: str = "dense_mlp") -> list[Kept]:
    """A gated MLP whose weights are cut over tp: the dense layers' or the shared experts'."""
    S, b = work.tokens, work.itemsize
    is_shared = part == "shared_experts"
    width = c.moe_shared_expert_intermediate_size if is_shared else c.ffn_hidden_size
    inner = b * S * width / c.tensor_model_parallel_size
    s, is_trained, kept = S / c.tensor_model_parallel_size, part in work.trained, []
    if not is_shared:
        kept += norm_kept(part, "norm", s, c.hidden_size, work, "norms" in work.trained)
    if is_trained and not is_shared:  # shared experts read what the router keeps already
        inputs = b * s * c.hidden_size
        kept.append(Kept(part, "input of fc1", "b s H", inputs, inputs))
    kept.append(Kept(part, "gate and up", "2 b S F; CPU 4 b S F", 4 * inner, 2 * inner))
    if is_trained:
        kept.append(Kept(part, "input of fc2", "b S F", inner, inner))
    return kept


def experts_kept(c: TransformerConfig, work: Work, needs_input_gradient: bool = True) -> list[Kept]:
    """Norm, router, routed and shared experts."""
    b, top_k, num_experts = work.itemsize, c.moe_router_topk, c.num_moe_experts
    s = work.tokens / c.tensor_model_parallel_size
    r = s * top_k * c.expert_tensor_parallel_size
    f = c.moe_ffn_hidden_size // c.expert_tensor_parallel_size
    kept = []
    if needs_input_gradient or "norms" in work.trained:
        kept += norm_kept("experts", "norm", s, c.hidden_size, work, "norms" in work.trained)
    normed = b * s * c.hidden_size
    kept.append(Kept("router", "input of router and shared experts", "b s H", normed, normed))
    scores = FP32 * s * num_experts if c.moe_router_score_function == "sigmoid" else 0
    chosen = s * top_k * (INDEX + FP32) + scores
    kept.append(Kept("router", "choices and their weights", "12 s top-k (+ 4 s E if sigmoid)", chosen, chosen))
    places, row_map = INDEX * s * (num_experts + 2 * top_k), 4 * s * (2 * num_experts + 1)
    kept.append(Kept("router", "places of tokens", "4 s (2E + 1); CPU 8 s (E + 2 top-k)", places, row_map))
    is_trained = "experts" in work.trained
    if is_trained:
        inputs = b * r * c.hidden_size
        kept.append(Kept("experts", "input of fc1", "b r H", inputs, inputs))
    inner = b * r * f
    kept.append(Kept("experts", "gate and up", "2 b r f; CPU 5 b r f", 5 * inner, 2 * inner))
    kept.append(Kept("experts", "weights of the routed tokens", "4 r", FP32 * r, FP32 * r))
    if is_trained:
        kept.append(Kept("experts", "input of fc2", "b r f", inner, inner))
    if c.moe_shared_expert_intermediate_size:
        kept += dense_mlp_kept(c, work, "shared_experts")
    return kept


def head_kept(c: TransformerConfig, work: Work, vocab: int) -> list[Kept]:
    """Final norm and output: logits of `vocab` rows (cut over tp already), or the value head where vocab = 0."""
    S, b, hidden = work.tokens, work.itemsize, c.hidden_size
    s = S / c.tensor_model_parallel_size
    kept = norm_kept("head", "final norm", s, hidden, work, "norms" in work.trained)
    if not vocab:
        gathered = FP32 * S * hidden
        return [*kept, Kept("head", "input of the value head, fp32 and gathered", "4 S H", gathered, gathered)]
    inputs, logits = b * s * hidden, b * S * vocab
    return [
        *kept,
        Kept("head", "input of the output layer", "b s H", inputs, inputs),
        Kept("head", "logits", "b S V", logits, logits),
        Kept("head", "token ids, maximum and sum of each row", "17 S", 17 * S, 17 * S),
    ]


def mtp_kept(c: TransformerConfig, work: Work, vocab: int) -> list[Kept]:
    """The MTP layer behind the last stage (models/mtp.py), which is never computed again, and its logits."""
    S, b, part = work.tokens, work.itemsize, "mtp"
    s, hidden = S / c.tensor_model_parallel_size, c.hidden_size
    kept = norm_kept(part, "norms of output and next token", 2 * s, hidden, work, True)
    joined, logits = 2 * b * s * hidden, b * S * vocab
    kept.append(Kept(part, "input of the joining projection", "2 b s H", joined, joined))
    kept += layer_kept(c, c.num_layers - 1, work)
    kept += norm_kept(part, "final norm", s, hidden, work, True)
    return [*kept, Kept(part, "logits", "b S V + 25 S", logits + 25 * S, logits + 25 * S)]


# ---- a stage ---------------------------------------------------------------------------------------------------


def is_moe_layer(c: TransformerConfig, layer: int) -> bool:
    """Whether a layer (from 0) has experts."""
    if not c.num_moe_experts:
        return False
    freq = c.moe_layer_freq
    return bool(freq[layer]) if isinstance(freq, list) else layer % freq == 0


def layer_kept(c: TransformerConfig, layer: int, work: Work, needs_input_gradient: bool = True) -> list[Kept]:
    """All that one layer keeps; without a gradient to its input, and with frozen attention, attention keeps nothing."""
    attention = attention_kept(c, work) if needs_input_gradient or "attention" in work.trained else []
    needs_gradient = needs_input_gradient or "attention" in work.trained
    if is_moe_layer(c, layer):
        return attention + experts_kept(c, work, needs_gradient)
    return attention + dense_mlp_kept(c, work)


@dataclass(frozen=True)
class Activations:
    """Activation memory of one rank at its peak; bytes."""

    kept: int  # by the micro-batches in flight
    working: int  # "full" only: the layer that is being computed again
    head: int  # final norm, logits or values; on the last stage
    gradients: int  # that backward holds at the same time, and the fp32 chunks of log-probs
    choices: int  # of sparse attention, shared between layers; not held by autograd
    in_flight: float  # micro-batches, a chunk's part counted as a part

    @property
    def saved_for_backward(self) -> int:
        """What autograd holds: the part that tests measure."""
        return self.kept + max(self.working, self.head)

    @property
    def total(self) -> int:
        """At the peak of backward."""
        return self.saved_for_backward + self.gradients + self.choices


def stage_activations(
    c: TransformerConfig,
    chunks: Sequence[range],
    work: Work,
    *,
    stage: int,
    num_stages: int,
    num_micro_batches: int,
    recompute: Recompute,
    vocab: int,
    device: Device,
    with_mtp: bool = False,
) -> Activations:
    """The peak of one pipeline stage.

    Args:
        with_mtp: the last stage has the policy's MTP layer, too.
        chunks: layers (from 0) of each chunk of the stage.
        vocab: rows of this rank's output layer, 0 for a value model. The head counts on the last stage only.
    """
    gradient_flows = stage > 0 or "embeddings" in work.trained or recompute == "full"
    boundary = work.itemsize * work.tokens / c.tensor_model_parallel_size * c.hidden_size
    by_chunk, largest_layer, largest_part = [], 0.0, 0.0
    for layers in chunks:
        total = 0.0
        for layer in layers:
            kept = layer_kept(c, layer, work, gradient_flows)
            gradient_flows = True
            whole = sum(k.on(device) for k in kept if not (k.is_core and recompute == "selective"))
            total += boundary if recompute == "full" else whole
            largest_layer = max(largest_layer, whole - boundary)
            largest_part = max([largest_part, *part_bytes(kept, device).values()])
        by_chunk.append(total)
    if stage == 0:
        by_chunk[0] += INDEX * work.tokens
    in_flight = chunks_in_flight(stage, num_stages, len(chunks), num_micro_batches, by_chunk)
    choices = [sum(choice_bytes(c, layer, work) for layer in layers) for layers in chunks]
    is_last = stage == num_stages - 1
    ends = head_kept(c, work, vocab) + (mtp_kept(c, work, vocab) if with_mtp else [])
    head = sum(k.on(device) for k in ends) if is_last else 0.0
    logits = work.itemsize * work.tokens * vocab + 3 * CHUNK_BYTES["cuda"] if is_last and vocab else 0
    return Activations(
        kept=round(sum(number * size for number, size in zip(in_flight, by_chunk, strict=True))),
        working=round(largest_layer) if recompute == "full" else 0,
        head=round(head),
        choices=round(sum(number * size for number, size in zip(in_flight, choices, strict=True))),
        gradients=round(max(largest_part, logits) + 2 * boundary),
        in_flight=sum(in_flight) / len(chunks),
    )


def part_bytes(kept: Sequence[Kept], device: Device) -> dict[str, float]:
    """Bytes by part."""
    parts: dict[str, float] = {}
    for k in kept:
        parts[k.part] = parts.get(k.part, 0.0) + k.on(device)
    return parts


def chunks_in_flight(
    stage: int, num_stages: int, num_chunks: int, num_micro_batches: int, weight: Sequence[float]
) -> list[int]:
    """How many micro-batches each chunk of a stage keeps when all of them together weigh the most.

    1F1B: num_stages - stage. Interleaved: Megatron runs micro-batches in groups of num_stages, a group through chunk 0,
    then the group through chunk 1, and so on; (num_stages - stage - 1) * 2 + (num_chunks - 1) * num_stages chunk passes
    go ahead of the first backward pass, which takes chunks in the opposite order.
    Args: weight: bytes of one micro-batch in each chunk.
    """
    total = num_micro_batches * num_chunks
    ahead = num_stages - stage - 1
    if num_chunks > 1:
        ahead = 2 * ahead + (num_chunks - 1) * num_stages
    order = _chunk_order(num_stages, num_chunks, num_micro_batches, lambda chunk: chunk)
    back = _chunk_order(num_stages, num_chunks, num_micro_batches, lambda chunk: num_chunks - 1 - chunk)
    flying, most = [0] * num_chunks, [0] * num_chunks
    for number in range(total):
        flying[order[number]] += 1
        if _weight(flying, weight) > _weight(most, weight):
            most = list(flying)
        if number >= ahead:
            flying[back[number - ahead]] -= 1
    return most


def _chunk_order(group: int, num_chunks: int, num_micro_batches: int, direction: Callable[[int], int]) -> list[int]:
    order = []
    for first in range(0, num_micro_batches, group):
        size = min(group, num_micro_batches - first)
        order += [direction(chunk) for chunk in range(num_chunks) for _ in range(size)]
    return order


def _weight(numbers: Sequence[int], weight: Sequence[float]) -> float:
    return sum(n * w for n, w in zip(numbers, weight, strict=True))
