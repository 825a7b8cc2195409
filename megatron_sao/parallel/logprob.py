"""Log-probabilities of given tokens with the vocabulary cut over the tensor axis, in chunks along the sequence.

The [S, V] logits are never turned into fp32 as a whole: forward keeps a maximum and two sums per token, backward forms
softmax chunk by chunk. A chunk is as many tokens as fit into `CHUNK_BYTES`, so that what this takes besides the logits
and their gradient depends neither on S nor on V. Padded vocabulary rows get no probability.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state

# One float32 copy of a chunk; about three exist at a time. A CPU wants them in its cache, a GPU wants long kernels.
CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}


class _VocabParallelLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, token_ids, temperature, true_vocab, group, overwrites_logits):
        size, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        num_tokens, width = logits.shape
        first = rank * width
        num_valid = max(0, min(width, true_vocab - first))  # columns beyond are padding
        is_here = (token_ids >= first) & (token_ids < first + num_valid)
        local_ids = (token_ids - first).clamp(0, max(num_valid - 1, 0))
        # Per token, over this rank's columns x: max x, y = (x - max) / temperature of the token, sums of e^y and y e^y.
        lowest = torch.finfo(torch.float32).min
        highest = torch.full((num_tokens,), lowest, dtype=torch.float32, device=logits.device)
        total, weighted, chosen = (torch.zeros_like(highest) for _ in range(3))
        for part in _chunks(logits) if num_valid else ():
            x = logits[part, :num_valid]
            highest[part] = x.amax(-1).float()
            y = _shifted(x, highest[part], temperature).clamp_min_(lowest)  # a y of -inf would make y e^y NaN
            chosen[part] = y.gather(-1, local_ids[part, None]).squeeze(-1)
            weight = y.exp()
            total[part] = weight.sum(-1)
            weighted[part] = weight.mul_(y).sum(-1)
        if size > 1:
            below = highest.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            below = ((below - highest) / temperature).clamp_min_(lowest)  # stays finite on a rank of padding only
            scale = below.exp()
            chosen, weighted, total = chosen + below, scale * (weighted + below * total), scale * total
        chosen = torch.where(is_here, chosen, 0.0)
        if size > 1:
            packed = torch.stack([chosen, total, weighted])
            dist.all_reduce(packed, group=group)
            chosen, total, weighted = packed.unbind(0)
        log_total = total.log()
        ctx.save_for_backward(logits, local_ids, is_here, highest + temperature * log_total)
        ctx.temperature, ctx.num_valid, ctx.overwrites_logits = temperature, num_valid, overwrites_logits
        entropy = log_total - weighted / total
        ctx.mark_non_differentiable(entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx, grad, _):
        logits, local_ids, is_here, normalizer = ctx.saved_tensors
        num_valid, grad = ctx.num_valid, grad / ctx.temperature
        # Written over what autograd saved: should anyone else still need it, autograd sees that and refuses.
        grad_logits = logits if ctx.overwrites_logits else torch.empty_like(logits)
        grad_logits[:, num_valid:] = 0
        at_token = torch.where(is_here, grad, 0.0)
        for part in _chunks(logits) if num_valid else ():
            chunk = _shifted(logits[part, :num_valid], normalizer[part], ctx.temperature)
            chunk.exp_().mul_(-grad[part, None])
            # In float32: 1 - p of a likely token would be lost in bfloat16.
            chunk.scatter_add_(-1, local_ids[part, None], at_token[part, None])
            grad_logits[part, :num_valid] = chunk
        return grad_logits, None, None, None, None, None


def _shifted(logits: torch.Tensor, offset: torch.Tensor, temperature: float) -> torch.Tensor:
    """(logits [s, V/tp] - offset float32 [s]) / temperature: float32, whatever the logits are."""
    shifted = logits - offset[:, None]
    return shifted if temperature == 1.0 else shifted.div_(temperature)


def _chunks(logits: torch.Tensor):
    num_tokens, width = logits.shape
    step = max(1, CHUNK_BYTES[logits.device.type] // (4 * width))
    for start in range(0, num_tokens, step):
        yield slice(start, min(start + step, num_tokens))


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
    overwrites_logits: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits / temperature)[token_ids] and the entropy of the same distribution.

    Args:
        logits: [S, V/tp] any float dtype, this rank's columns.
        token_ids: int64 [S], in [0, true_vocab).
        temperature: the sampling temperature, > 0.
        true_vocab: columns at or beyond it (counted over all ranks) are padding and get probability 0.
        group: the tensor axis; None = not cut.
        overwrites_logits: backward puts the gradient where the logits are, which saves as much memory again; the
            caller must not look at them afterwards, and backward runs once.
    Returns: (logp float32 [S] with gradient to logits, entropy float32 [S] without), equal on all ranks of the axis.
    Collective: every rank of the tensor axis calls it with the same number of tokens.
    """
    return _VocabParallelLogprob.apply(logits, token_ids, temperature, true_vocab, group, overwrites_logits)
