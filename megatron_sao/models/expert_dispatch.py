"""The all-gather way to the experts, for packed micro-batches, whose lengths differ between data-parallel ranks."""

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher


class PackedAllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """Every rank that shares the experts gets the tokens of all of them; their outputs are summed back.

    megatron-core 0.19: its dispatcher takes equal numbers of tokens for granted and its configuration therefore refuses
    variable lengths. Here the numbers are exchanged first.
    """

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor):
        """hidden states [S, H] and probs [S, num_experts] of this rank -> of all ranks, in rank order."""
        if self.tp_ep_group.size() == 1:
            return hidden_states, probs
        num_tokens = torch.tensor([len(hidden_states)], device=hidden_states.device)
        self._num_tokens_by_rank = gather_from_sequence_parallel_region(num_tokens, group=self.tp_ep_group).tolist()

        def gather(x: torch.Tensor) -> torch.Tensor:
            return gather_from_sequence_parallel_region(
                x.contiguous(), group=self.tp_ep_group, output_split_sizes=self._num_tokens_by_rank
            )

        with torch.no_grad():
            self.routing_map = gather(self.routing_map)
        return gather(hidden_states), gather(probs)

    def token_combine(self, hidden_states: torch.Tensor):
        """Partial outputs for the tokens of all ranks -> whole outputs [S, H] for this rank's tokens."""
        if self.tp_ep_group.size() == 1:
            return hidden_states
        summed = reduce_scatter_to_sequence_parallel_region(
            hidden_states.to(self.local_probs.dtype),
            group=self.tp_ep_group,
            input_split_sizes=self._num_tokens_by_rank,
        )
        return summed.to(hidden_states.dtype)


def use_packed_dispatcher(chunk: torch.nn.Module) -> None:
    """Effect: the chunk's all-gather dispatchers, if it has any, take packed micro-batches."""
    for layer in chunk.modules():
        if isinstance(layer, MoELayer) and isinstance(layer.token_dispatcher, MoEAllGatherTokenDispatcher):
            layer.token_dispatcher.__class__ = PackedAllGatherDispatcher  # the same state, two other methods
