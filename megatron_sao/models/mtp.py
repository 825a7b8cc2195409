"""A policy with a multi-token-prediction (MTP) layer: it drafts the token after the next one.

Position j of the MTP layer reads the decoder's output at j and token j + 1, and its logits are about token j + 2.
Invariants:
- Its heads are detached: neither the decoder, nor the embedding, nor the output layer gets a gradient from it. The
  policy learns as if it were not there; the layer learns what the policy writes, for engines that speculate with it.
- Its loss is no business of the model's. The model gives logits when asked for them, the schedule adds the loss with
  the one loss scale (parallel/schedule.py). megatron-core 0.19 would make labels of the input ids and add a loss of
  its own to every backward, also without labels, scaled by the tokens of the micro-batch.
- With pipeline stages it lives on the last one, with a copy of the embedding that Megatron keeps equal to the first
  stage's: it sums the gradients of both.
"""

import torch
from megatron.core.models.gpt.gpt_model import GPTModel


class PolicyWithMTP(GPTModel):
    """GPTModel that also gives the MTP layer's logits when it is called with `output_processor_context`.

    That argument, which Megatron hands on untouched, holds the next token of each position: int64 [1, S]. The output is
    then (logits, MTP logits), float [1, S, V/tp] each; else, and on other stages, it is what it always is.
    """

    def _postprocess(
        self,
        hidden_states,
        *,
        rotary_pos_emb=None,
        packed_seq_params=None,
        output_processor_context: torch.Tensor | None = None,
        **_,
    ):
        if not self.post_process:
            return hidden_states
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden_states, weight=tied)
        logits = logits.transpose(0, 1).contiguous()
        next_ids = output_processor_context
        if next_ids is None:
            return logits
        drafted = self.mtp.layers[0].forward_single_position(
            hidden_states.detach(),
            next_ids,
            position_ids=None,
            embedding=lambda **ids: self.embedding(**ids).detach(),
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
        )
        weight = self.output_layer.weight if tied is None else tied
        mtp_logits, _ = self.output_layer(drafted, weight=weight.detach())
        return logits, mtp_logits.transpose(0, 1).contiguous()
