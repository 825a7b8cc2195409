"""One update of the value model by regression on its targets."""

import torch

from megatron_sao.data.share import MicroBatch, Share
from megatron_sao.models.optimizer import TrainedModel
from megatron_sao.parallel.exchange import merge_over_data
from megatron_sao.parallel.schedule import is_last_stage, run_schedule
from megatron_sao.train.shares import whole_from_last_stage
from megatron_sao.train.values import ValueReadout


def value_update(
    model: TrainedModel, share: Share, target: torch.Tensor, value_before: torch.Tensor, readout: ValueReadout
) -> dict[str, float]:
    """loss = sum over action tokens of 0.5 * (V - target)^2 / action tokens of the step; one optimizer step.

    Args:
        target, value_before: float32 [S] over the share; anything off the action mask.
    Returns: loss, gradient norm before clipping, learning rate, 1.0 if the update was skipped as non-finite.
    Collective: every rank of the world.
    """

    def loss_function(outputs: torch.Tensor, micro_batch: MicroBatch):
        index = micro_batch.token_index

        def here(x: torch.Tensor) -> torch.Tensor:
            return micro_batch.at_positions(x).to(outputs.device)

        mask = here(micro_batch.batch.action_mask)
        wanted, old = here(target[index]), here(value_before[index])
        loss = readout.loss(outputs, wanted, old, mask, share.num_step_action_tokens)
        return loss, {"loss": loss.detach().clone()}  # the schedule works on the loss tensor in place

    model.zero_grad()
    learning_rate = model.learning_rate
    reports = run_schedule(model.wrapped, share.micro_batches, loss_function, backward=True)
    was_done, grad_norm = model.update()
    return {
        "value/loss": step_loss(reports),
        "value/grad_norm": grad_norm,
        "value/learning_rate": learning_rate,
        "value/skipped_updates": float(not was_done),
    }


def step_loss(reports: list[dict], name: str = "loss") -> float:
    """The loss of the whole step from the shares in `reports`. Collective: context, pipeline and data axes."""
    local = torch.stack([r[name].float().cpu() for r in reports]).sum() if is_last_stage() else None
    return float(merge_over_data({"loss": whole_from_last_stage(local, ())})["loss"])
