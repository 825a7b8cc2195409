"""Log-probabilities of given tokens with the vocabulary cut over the tensor axis, in chunks along the sequence.

The [S, V] logits are never turned into fp32 as a whole: forward keeps a maximum and a sum per token, backward forms
softmax chunk by chunk. Padded vocabulary rows get no probability.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state

CHUNK_TOKENS = 2048


class _VocabParallelLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, token_ids, temperature, true_vocab, group):
        size, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        width = logits.shape[-1]
        first = rank * width
        local_ids = token_ids - first
        is_here = (local_ids >= 0) & (local_ids < width)
        num_valid = max(0, min(width, true_vocab - first))  # columns beyond are padding
        local_ids = local_ids.clamp(0, max(num_valid - 1, 0))
        num_tokens = logits.shape[0]
        highest = torch.empty(num_tokens, dtype=torch.float32, device=logits.device)
        chosen = torch.empty_like(highest)
        for part in _chunks(num_tokens):
            scaled = logits[part].float() / temperature
            highest[part] = (
                scaled[:, :num_valid].amax(-1) if num_valid else torch.full_like(highest[part], float("-inf"))
            )
            picked = scaled.gather(-1, local_ids[part, None]).squeeze(-1)
            chosen[part] = torch.where(is_here[part], picked, torch.zeros_like(picked))
        if size > 1:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        total = torch.zeros_like(highest)
        weighted = torch.zeros_like(highest)  # sum of exp(x - max) * (x - max), for the entropy
        for part in _chunks(num_tokens):
            shifted = logits[part, :num_valid].float() / temperature - highest[part, None]
            weight = shifted.exp()
            total[part] = weight.sum(-1)
            weighted[part] = (weight * shifted).nan_to_num(0.0).sum(-1)
        if size > 1:
            packed = torch.stack([chosen, total, weighted])
            dist.all_reduce(packed, group=group)
            chosen, total, weighted = packed.unbind(0)
        log_total = total.log()
        ctx.save_for_backward(logits, local_ids, is_here, highest, log_total)
        ctx.temperature, ctx.num_valid = temperature, num_valid
        entropy = log_total - weighted / total
        ctx.mark_non_differentiable(entropy)
        return chosen - highest - log_total, entropy

    @staticmethod
    def backward(ctx, grad, _):
        logits, local_ids, is_here, highest, log_total = ctx.saved_tensors
        grad_logits = torch.zeros_like(logits)
        if ctx.num_valid == 0:
            return grad_logits, None, None, None, None
        at_token = torch.where(is_here, grad, torch.zeros_like(grad))
        for part in _chunks(logits.shape[0]):
            shifted = logits[part, : ctx.num_valid].float() / ctx.temperature - (highest + log_total)[part, None]
            chunk = shifted.exp().mul_(-grad[part, None])
            # In float32: 1 - p of a likely token would be lost in bfloat16.
            chunk.scatter_add_(-1, local_ids[part, None], at_token[part, None])
            grad_logits[part, : ctx.num_valid] = chunk.div_(ctx.temperature).to(logits.dtype)
        return grad_logits, None, None, None, None


def _chunks(num_tokens: int):
    for start in range(0, num_tokens, CHUNK_TOKENS):
        yield slice(start, min(start + CHUNK_TOKENS, num_tokens))


def tensor_axis() -> dist.ProcessGroup:
    """The ranks that share this rank's vocabulary."""
    return parallel_state.get_tensor_model_parallel_group()


def vocab_parallel_logprob(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    temperature: float,
    true_vocab: int,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits / temperature)[token_ids] and the entropy of the same distribution.

    Args:
        logits: [S, V/tp] any float dtype, this rank's columns.
        token_ids: int64 [S], in [0, true_vocab).
        temperature: the sampling temperature, > 0.
        true_vocab: columns at or beyond it (counted over all ranks) are padding and get probability 0.
        group: the tensor axis; None = not cut.
    Returns: (logp float32 [S] with gradient to logits, entropy float32 [S] without), equal on all ranks of the axis.
    Collective: every rank of the tensor axis calls it with the same number of tokens.
    """
    return _VocabParallelLogprob.apply(logits, token_ids, temperature, true_vocab, group)
