"""Log-probabilities of the learner from the decoder's logits."""

import torch

from megatron_sao.data.share import MicroBatch
from megatron_sao.parallel.logprob import tensor_axis, vocab_parallel_logprob


def learner_logprob(
    logits: torch.Tensor, micro_batch: MicroBatch, temperature: float, true_vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """log-prob and entropy at this rank's positions of a micro-batch, from logits [P, V/tp]: float32 [P] each.

    Gradient flows through the log-prob. Where a position is about no token they are about token id 0, and to be left
    out. Effect: backward writes over the logits. Collective: the tensor axis.
    """
    next_ids = micro_batch.at_positions(micro_batch.batch.token_ids).to(logits.device)
    return vocab_parallel_logprob(
        logits,
        next_ids,
        temperature=temperature,
        true_vocab=true_vocab,
        group=tensor_axis(),
        overwrites_logits=True,  # nothing else reads what the output layer wrote
    )
