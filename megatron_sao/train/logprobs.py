"""Log-probabilities of the learner, about each token, from the decoder's logits."""

import torch

from megatron_sao.data.batch import from_decoder, to_decoder
from megatron_sao.data.share import MicroBatch
from megatron_sao.parallel.logprob import tensor_axis, vocab_parallel_logprob


def learner_logprob(
    logits: torch.Tensor, micro_batch: MicroBatch, temperature: float, true_vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """log-prob and entropy ABOUT each token of a micro-batch, from decoder logits [S, V/tp]: float32 [S] each.

    Gradient flows through the log-prob; both are 0 at first tokens. Collective: the tensor axis.
    """
    starts = micro_batch.batch.starts.to(logits.device)
    next_ids = to_decoder(micro_batch.batch.token_ids.to(logits.device), starts)
    logp, entropy = vocab_parallel_logprob(
        logits, next_ids, temperature=temperature, true_vocab=true_vocab, group=tensor_axis()
    )
    return from_decoder(logp, starts), from_decoder(entropy, starts)
