"""One update of the policy by direct double-sided importance sampling (or the loss of a control arm)."""

import torch

from megatron_sao.algo.dis import dis_loss, dis_metrics, dis_statistics
from megatron_sao.algo.policy_losses import one_sided_loss, ppo_clip_loss
from megatron_sao.config.algo import Algo
from megatron_sao.data.batch import PackedBatch
from megatron_sao.data.share import MicroBatch, Share
from megatron_sao.models.optimizer import Learner
from megatron_sao.parallel.exchange import max_over_data, sum_over_data
from megatron_sao.parallel.schedule import run_schedule
from megatron_sao.train.logprobs import learner_logprob
from megatron_sao.train.shares import scatter_to_share
from megatron_sao.train.value_step import step_loss


def policy_loss(
    algo: Algo, logp_learner: torch.Tensor, batch: PackedBatch, advantage: torch.Tensor, num_action_tokens: int
) -> torch.Tensor:
    """This share's part of the policy loss: -sum f(ratio) * A * logp / action tokens of the step, for the arm's f.

    Args: logp_learner float32 [S] with gradient; advantage float32 [S]; both about the tokens of `batch`.
    """
    given = (logp_learner, batch.logp_sampler, advantage, batch.action_mask)
    if algo.loss == "ppo_clip":
        return ppo_clip_loss(
            *given, clip_low=algo.ppo_clip_low, clip_high=algo.ppo_clip_high, num_action_tokens=num_action_tokens
        )
    loss = {"dis": dis_loss, "one_sided": one_sided_loss}[algo.loss]
    return loss(*given, eps_low=batch.eps_low_t, eps_high=batch.eps_high_t, num_action_tokens=num_action_tokens)


def policy_update(
    model: Learner, share: Share, advantage: torch.Tensor, algo: Algo, temperature: float, true_vocab: int
) -> dict[str, float]:
    """One optimizer step of the policy on the share.

    Args:
        advantage: float32 [S] over the share; anything off the action mask.
        temperature: the sampling temperature, so that learner and sampler score the same distribution.
    Returns: metrics of the whole step (loss, gradient norm, rejected fractions, agreement with the sampler by lag).
    Collective: every rank of the world.
    """
    weighted = advantage * token_weight(algo, share)

    def loss_function(logits: torch.Tensor, micro_batch: MicroBatch):
        batch = micro_batch.batch.to(logits.device)
        logp, entropy = learner_logprob(logits, micro_batch, temperature, true_vocab)
        advantage_here = weighted[micro_batch.token_index].to(logits.device)
        loss = policy_loss(algo, logp, batch, advantage_here, share.num_step_action_tokens)
        return loss, {"loss": loss.detach().clone(), "logp": logp.detach().cpu(), "entropy": entropy.cpu()}

    model.zero_grad()
    learning_rate = model.learning_rate
    reports = run_schedule(model.wrapped, share.micro_batches, loss_function, backward=True)
    was_done, grad_norm = model.update()
    return {
        "policy/loss": step_loss(reports),
        "policy/grad_norm": grad_norm,
        "policy/learning_rate": learning_rate,
        "policy/skipped_updates": float(not was_done),
        **sampler_agreement(share, scatter_to_share(reports, "logp", share), scatter_to_share(reports, "entropy", share)),
    }


def token_weight(algo: Algo, share: Share) -> torch.Tensor:
    """Factor on each token's advantage that turns the token mean into the configured mean: float32 [S].

    aggregation "token": 1. "trajectory": action tokens of the step / (trajectories of the step * action tokens of this
    trajectory), so that after the division by the action tokens of the step each trajectory counts the same.
    """
    batch = share.batch
    if algo.aggregation == "token":
        return torch.ones(batch.num_tokens)
    owner = batch.trajectory_of_token()
    per_trajectory = torch.zeros(batch.num_trajectories).index_add(0, owner, batch.action_mask.float())
    share_of_step = share.num_step_action_tokens / max(share.num_step_trajectories, 1)
    return share_of_step / per_trajectory.clamp(min=1)[owner]


ROUND_OFF = 1e-4  # learner and sampler of the same version may differ by this much in a log-prob, in fp32


def sampler_agreement(share: Share, logp_learner: torch.Tensor, entropy: torch.Tensor) -> dict[str, float]:
    """How learner and sampler agree on the action tokens of the step: DIS statistics, also by lag, and entropy.

    At lag 0 both hold the same weights, so their log-probs differ by round-off alone; `count_above` says for how many
    tokens they differ by more than `ROUND_OFF` (a near tie of the router can send a token to another expert).
    Collective: the data axis.
    """
    batch = share.batch
    mask = batch.action_mask
    sums = dis_statistics(
        logp_learner,
        batch.logp_sampler,
        mask,
        eps_low=batch.eps_low_t,
        eps_high=batch.eps_high_t,
        lag_t=batch.lag_t,
    )
    fresh = mask & (batch.lag_t == 0)
    difference = (logp_learner - batch.logp_sampler).abs()[fresh]
    totals = sum_over_data(
        {
            "entropy": float(entropy[mask].sum()),
            "fresh": float(fresh.sum()),
            "above": float((difference > ROUND_OFF).sum()),
            "lag": float(batch.lag_t[mask].sum()),
            "lagged": float((batch.lag_t[mask] >= 1).sum()),
        }
    )
    largest = max_over_data(
        {
            "difference": float(difference.max()) if len(difference) else 0.0,
            "lag": float(batch.lag_t.max()) if len(mask) else 0.0,
        }
    )
    count = max(share.num_step_action_tokens, 1)
    return {
        **dis_metrics(sum_over_data(sums)),
        "policy/entropy": totals["entropy"] / count,
        "agreement/lag0_tokens": totals["fresh"],
        "agreement/lag0_count_above": totals["above"],
        "agreement/lag0_logp_diff_max": largest["difference"],
        "lag/token_mean": totals["lag"] / count,
        "lag/token_max": largest["lag"],
        "lag/lagged_token_fraction": totals["lagged"] / count,
    }
