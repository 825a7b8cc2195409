"""What one data-parallel rank works on in a step: its trajectories, cut into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_sao.data.balance import micro_batches
from megatron_sao.data.batch import PackedBatch


@dataclass(frozen=True)
class MicroBatch:
    """Some trajectories of a share, with filler tokens behind them where a layout needs a round number of tokens.

    The fillers form a segment of their own: no real token attends to them, no loss reads them. A micro-batch without
    trajectories (a rank has fewer than its peers) is all filler.
    """

    batch: PackedBatch
    token_index: torch.Tensor  # int64 [S]: positions of these tokens in the share
    num_filler_tokens: int

    def padded_token_ids(self) -> torch.Tensor:
        """int64 [S + fillers]"""
        return torch.cat([self.batch.token_ids, self.batch.token_ids.new_zeros(self.num_filler_tokens)])

    def padded_starts(self) -> torch.Tensor:
        """Cumulative lengths with the filler segment at the end, empty trajectories left out: int64."""
        end = self.batch.num_tokens + self.num_filler_tokens
        return torch.unique(torch.cat([self.batch.starts, self.batch.starts.new_tensor([0, end])]))


@dataclass(frozen=True)
class Share:
    """A rank's part of one step. Per-token results of a step ([S] over `batch`) live on it until the step ends."""

    batch: PackedBatch
    micro_batches: list[MicroBatch]
    num_step_action_tokens: int  # of the whole step, over all ranks: THE denominator of every token mean
    num_step_trajectories: int  # trajectories with an action token, of the whole step
    numbers: list[int]  # which trajectories of the step these are
    step_reward_n: torch.Tensor  # float32 [all trajectories of the step]
    step_group_n: torch.Tensor  # int64 [all trajectories of the step]


def share_of(batch: PackedBatch, rank: int, num_ranks: int, budget_tokens: int, multiple: int) -> Share:
    """The part of `rank` out of `num_ranks` data-parallel ranks.

    Args:
        batch: the whole step; the same on every rank.
        budget_tokens: largest micro-batch in tokens (a longer trajectory stands alone).
        multiple: tokens of a micro-batch are filled up to a multiple of it (size of the tensor axis, which cuts them
            under sequence parallelism).
    """
    plan = micro_batches(batch.lengths().tolist(), num_ranks, budget_tokens)[rank]
    mine = [number for part in plan for number in part]
    share_batch = batch.select(mine)
    parts, first = [], 0
    for part in plan:
        parts.append(_micro_batch(share_batch, range(first, first + len(part)), multiple))
        first += len(part)
    has_action = torch.zeros(batch.num_trajectories, dtype=torch.bool)
    has_action[batch.trajectory_of_token()[batch.action_mask]] = True
    return Share(
        batch=share_batch,
        micro_batches=parts,
        num_step_action_tokens=batch.num_action_tokens,
        num_step_trajectories=int(has_action.sum()),
        numbers=mine,
        step_reward_n=batch.reward_n,
        step_group_n=batch.group_n,
    )


def _micro_batch(share_batch: PackedBatch, numbers: Sequence[int], multiple: int) -> MicroBatch:
    batch = share_batch.select(list(numbers))
    fillers = -batch.num_tokens % multiple if batch.num_tokens else multiple
    return MicroBatch(batch, share_batch.token_index(list(numbers)), fillers)
