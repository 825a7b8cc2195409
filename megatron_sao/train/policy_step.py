"""One update of the policy by direct double-sided importance sampling (or the loss of a control arm)."""

import torch

from megatron_sao.algo.dis import dis_loss, dis_metrics, dis_statistics, policy_gradient_loss
from megatron_sao.algo.masked import masked_sum, trajectory_mean_denominator
from megatron_sao.algo.policy_losses import one_sided_weight, ppo_clip_loss
from megatron_sao.config import Config
from megatron_sao.config.algo import Algo
from megatron_sao.data.share import MicroBatch, Share
from megatron_sao.models.optimizer import TrainedModel
from megatron_sao.parallel.exchange import merge_over_data
from megatron_sao.parallel.schedule import run_schedule
from megatron_sao.train.logprobs import learner_logprob
from megatron_sao.train.mtp import mtp_loss
from megatron_sao.train.shares import scatter_to_share
from megatron_sao.train.value_step import step_loss


def policy_update(
    model: TrainedModel, share: Share, advantage: torch.Tensor, config: Config, true_vocab: int
) -> dict[str, float]:
    """One optimizer step of the policy on the share.

    Learner and sampler are scored at the same (sampling) temperature.

    Args: advantage: float32 [S] over the share; anything off the action mask.
    Returns: metrics of the whole step (loss, gradient norm, rejected fractions, agreement with the sampler by lag).
    Collective: every rank of the world.
    """
    temperature = config.sampling.temperature

    def loss_function(logits: torch.Tensor, micro_batch: MicroBatch):
        logp, entropy = learner_logprob(logits, micro_batch, temperature, true_vocab)
        loss = policy_loss(config.algo, logp, micro_batch, advantage, share)
        return loss, {"loss": loss.detach().clone(), "logp": logp.detach(), "entropy": entropy}

    weight = config.policy.mtp_loss_weight

    def mtp_loss_function(mtp_logits: torch.Tensor, micro_batch: MicroBatch):
        loss = mtp_loss(mtp_logits, micro_batch, share, temperature, true_vocab)
        return weight * loss, {"mtp_loss": loss.detach().clone()}

    model.zero_grad()
    learning_rate = model.learning_rate
    reports = run_schedule(
        model.wrapped,
        share.micro_batches,
        loss_function,
        backward=True,
        mtp_loss_function=mtp_loss_function if weight else None,
    )
    was_done, grad_norm = model.update()
    logp, entropy = scatter_to_share(reports, "logp", share), scatter_to_share(reports, "entropy", share)
    return {
        "policy/loss": step_loss(reports),
        "policy/grad_norm": grad_norm,
        "policy/learning_rate": learning_rate,
        "policy/skipped_updates": float(not was_done),
        **({"policy/mtp_loss": step_loss(reports, "mtp_loss")} if weight else {}),
        **sampler_agreement(share, logp, entropy, num_lags=config.schedule.max_staleness + 1),
    }


def policy_loss(
    algo: Algo, logp_learner: torch.Tensor, micro_batch: MicroBatch, advantage: torch.Tensor, share: Share
) -> torch.Tensor:
    """This rank's part of the policy loss of a micro-batch: -sum f(ratio) * A * logp / (what the whole step counts).

    Args:
        logp_learner: float32 [P] with gradient, at this rank's positions of the micro-batch.
        advantage: float32 [S] over the share, of which the micro-batch is a part.
    """
    batch = micro_batch.batch

    def here(x: torch.Tensor) -> torch.Tensor:
        return micro_batch.at_positions(x).to(logp_learner.device)

    if algo.aggregation == "token":
        count = share.num_step_action_tokens
    else:
        count = here(trajectory_mean_denominator(batch.action_mask, batch.starts, share.num_step_trajectories))
    advantage, mask = here(advantage[micro_batch.token_index]), here(batch.action_mask)
    given = (logp_learner, here(batch.logp_sampler), advantage, mask)
    eps = {"eps_low": here(batch.eps_low_t), "eps_high": here(batch.eps_high_t)}
    if algo.loss == "dis":
        return dis_loss(*given, **eps, num_action_tokens=count)
    if algo.loss == "one_sided":
        weight = one_sided_weight(*given[:3], **eps)
        return policy_gradient_loss(weight, logp_learner, advantage, mask, num_action_tokens=count)
    return ppo_clip_loss(
        *given, clip_low=algo.ppo_clip_low, clip_high=algo.ppo_clip_high, num_action_tokens=count
    )


def sampler_agreement(
    share: Share, logp_learner: torch.Tensor, entropy: torch.Tensor, num_lags: int
) -> dict[str, float]:
    """How learner and sampler agree on the action tokens of the step: DIS statistics, also by lag; entropy and lag.

    At lag 0 both hold the same weights, so `dis/max_abs_logp_diff/lag0` is round-off alone, but for the rare token that
    a near tie of the router sends to another expert.
    Collective: the data axis.
    """
    batch, mask = share.batch, share.batch.action_mask
    statistics = dis_statistics(
        logp_learner,
        batch.logp_sampler,
        mask,
        eps_low=batch.eps_low_t,
        eps_high=batch.eps_high_t,
        lag_t=batch.lag_t,
        num_lags=num_lags,
    )
    lag = batch.lag_t.double()
    totals = merge_over_data(
        {
            **statistics,
            "entropy": masked_sum(entropy, mask),
            "lag": masked_sum(lag, mask),
            "lagged": (mask & (batch.lag_t > 0)).sum(),
            "max_lag": lag.max() if len(lag) else lag.sum(),
        }
    )
    count = max(share.num_step_action_tokens, 1)
    return {
        **dis_metrics({name: totals[name] for name in statistics}),
        "policy/entropy": float(totals["entropy"]) / count,
        "lag/token_mean": float(totals["lag"]) / count,
        "lag/token_max": float(totals["max_lag"]),
        "lag/lagged_token_fraction": float(totals["lagged"]) / count,
    }
