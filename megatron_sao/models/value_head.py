"""The scalar head of the value model."""

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class ValueHead(torch.nn.Module):
    """hidden -> 1 (or one logit per bin), fp32, zero at the start so that a fresh value model says exactly 0.

    Takes the place of GPTModel's output layer on the last pipeline stage. Its weight is whole on every tensor rank:
    after the gather every rank holds the same hidden states and so computes the same gradient, which is why the weight
    must NOT carry the sequence_parallel mark (Megatron would add those equal gradients up).
    """

    def __init__(self, config, num_outputs: int, tp_group):
        super().__init__()
        self.config, self.tp_group = config, tp_group
        self.weight = torch.nn.Parameter(torch.zeros(num_outputs, config.hidden_size, dtype=torch.float32))

    def forward(self, hidden, weight=None, runtime_gather_output=None):
        """hidden [S/tp, 1, H] (sequence parallel) or [S, 1, H] -> ([S, 1, num_outputs] float32, None)."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return torch.nn.functional.linear(hidden.float(), self.weight), None

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
