"""What the multi-token-prediction layer learns: to draft the policy's own text."""

import torch

from megatron_sao.algo.masked import masked_mean
from megatron_sao.data.batch import to_decoder
from megatron_sao.data.share import MicroBatch, Share
from megatron_sao.parallel.logprob import tensor_axis, vocab_parallel_logprob


def mtp_loss(
    logits: torch.Tensor, micro_batch: MicroBatch, share: Share, temperature: float, true_vocab: int
) -> torch.Tensor:
    """This micro-batch's part of -sum log p(token i + 1 | up to token i - 1, and i) / (action tokens of the step).

    The sum goes over neighbours i, i + 1 of one trajectory that are both actions: an engine asks for a draft only
    after a token that the policy itself wrote. The denominator is the one of every token mean, although a turn has one
    such pair fewer than tokens: so the loss is the same however the step is cut into micro-batches and over ranks.

    Args: logits: [P, V/tp] of the MTP layer, at this rank's positions.
    Returns: scalar float32 with gradient. Effect: backward writes over the logits. Collective: the tensor axis.
    """
    batch = micro_batch.batch

    def after(x: torch.Tensor) -> torch.Tensor:  # what is known of the token after the one that a position is about
        return micro_batch.at_positions(to_decoder(x, batch.starts)).to(logits.device)

    is_drafted = after(batch.action_mask) & micro_batch.at_positions(batch.action_mask).to(logits.device)
    logp, _ = vocab_parallel_logprob(
        logits,
        after(batch.token_ids),
        temperature=temperature,
        true_vocab=true_vocab,
        group=tensor_axis(),
        overwrites_logits=True,  # nothing else reads what the output layer wrote
    )
    return masked_mean(-logp, is_drafted, share.num_step_action_tokens)
