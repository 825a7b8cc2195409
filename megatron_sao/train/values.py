"""Values of a share's tokens, and how the head's outputs are read."""

import torch

from megatron_sao.algo.value_loss import HLGaussSupport, hl_gauss_loss, hl_gauss_value, value_loss
from megatron_sao.config.value import Value
from megatron_sao.data.share import MicroBatch, Share
from megatron_sao.parallel.schedule import run_schedule
from megatron_sao.train.shares import scatter_to_share


class ValueReadout:
    """Head outputs -> values, and their loss; temperature never enters here.

    mse: one output, the value itself. hl_gauss: one logit per bin, the value is the mean bin centre.
    """

    def __init__(self, config: Value):
        self.clip = config.value_clip or None
        self.support = None
        if config.loss == "hl_gauss":
            self.support = HLGaussSupport(
                config.hl_gauss_min, config.hl_gauss_max, config.hl_gauss_bins, config.hl_gauss_sigma
            )
        self.num_outputs = self.support.num_bins if self.support else 1

    def values(self, outputs: torch.Tensor) -> torch.Tensor:
        """[S, num_outputs] -> [S] float32, gradient kept."""
        if self.support:
            return hl_gauss_value(outputs, self.support)
        return outputs.squeeze(-1)

    def loss(
        self,
        outputs: torch.Tensor,
        target: torch.Tensor,
        old_value: torch.Tensor,
        mask: torch.Tensor,
        num_action_tokens: int,
    ) -> torch.Tensor:
        """This share's part of the value loss: scalar with gradient to `outputs` [S, num_outputs]."""
        if self.support:
            return hl_gauss_loss(outputs, target, mask, num_action_tokens=num_action_tokens, support=self.support)
        return value_loss(
            outputs.squeeze(-1), target, mask, num_action_tokens=num_action_tokens, clip=self.clip, old_value=old_value
        )


def infer_values(chunks: list[torch.nn.Module], share: Share, readout: ValueReadout) -> torch.Tensor:
    """V of the prefix before every token of the share: float32 [S] on the CPU, no gradient; 0 at first tokens.

    Collective: every rank calls it; other pipeline stages get the last stage's values.
    """

    def collect(outputs: torch.Tensor, micro_batch: MicroBatch):
        return outputs.new_zeros(()), {"value": readout.values(outputs).float()}

    reports = run_schedule(chunks, share.micro_batches, collect, backward=False)
    return scatter_to_share(reports, "value", share)
