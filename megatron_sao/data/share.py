"""What one data-parallel rank works on in a step: its trajectories, cut into micro-batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_sao.data.balance import Cost, micro_batches
from megatron_sao.data.batch import PackedBatch, to_decoder
from megatron_sao.data.context import context_index, segment_multiple


@dataclass(frozen=True)
class MicroBatch:
    """Some whole trajectories of a share, and what of them this rank's decoder sees: P positions.

    Without context parallelism the decoder sees all tokens; with it, two pieces of each trajectory (data/context.py).
    Where a layout needs round numbers, filler tokens stand behind the tokens of a trajectory and in a segment of their
    own at the end: no real token attends to them, no loss reads them. A micro-batch without trajectories (a rank has
    fewer than its peers) is all filler.
    """

    batch: PackedBatch  # whole trajectories, without fillers
    token_index: torch.Tensor  # int64 [S]: positions of these tokens in the share
    segment_starts: torch.Tensor  # int64 [segments + 1]: cumulative lengths of what attention sees, fillers included
    token_ids: torch.Tensor  # int64 [P]: what this rank's decoder reads
    about: torch.Tensor  # int64 [P]: which token of `batch` an output is about; -1: none (fillers, last tokens)

    def at_positions(self, about_token: torch.Tensor, fill: float | int | bool = 0) -> torch.Tensor:
        """What is known about each token, laid where this rank's decoder has its say on that token.

        Args: about_token: [S] any dtype.
        Returns: [P], same dtype and device; `fill` where an output is about no token.
        """
        filled = torch.cat([about_token, about_token.new_full((1,), fill)])
        return filled[self.about.to(about_token.device)]  # -1 is the last entry, the fill

    def onto_tokens(self, at_position: torch.Tensor) -> torch.Tensor:
        """Outputs of this rank's decoder laid back on the tokens that they are about.

        Args: at_position: [P], on the CPU.
        Returns: [S], same dtype; 0 at first tokens and at tokens that another context rank has the say on.
        """
        is_about = self.about >= 0
        about_token = at_position.new_zeros(self.batch.num_tokens)
        about_token[self.about[is_about]] = at_position[is_about]
        return about_token


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


def share_of(
    batch: PackedBatch,
    rank: int,
    num_ranks: int,
    budget_tokens: int,
    multiple: int,
    context_rank: int = 0,
    num_context_ranks: int = 1,
    *,
    cost: Cost = Cost(),
    micro_batch_multiple: int = 1,
) -> Share:
    """The part of `rank` out of `num_ranks` data-parallel ranks; its context ranks differ in their positions alone.

    Args:
        batch: the whole step; the same on every rank.
        budget_tokens: largest micro-batch in tokens, fillers behind trajectories included (a longer one stands alone).
        multiple: a context rank's positions are filled up to a multiple of it (size of the tensor axis, which cuts
            them under sequence parallelism).
        cost: what data-parallel ranks are balanced by.
        micro_batch_multiple: the number of micro-batches is filled up to a multiple of it (interleaved pipeline stages
            take them in groups of as many as there are stages); those added are all filler.
    """
    lengths = filled_lengths(batch.lengths(), num_context_ranks).tolist()
    plan = micro_batches(lengths, num_ranks, budget_tokens, cost=cost, multiple=micro_batch_multiple)[rank]
    mine = [number for part in plan for number in part]
    share_batch = batch.select(mine)
    parts, first = [], 0
    for part in plan:
        numbers = range(first, first + len(part))
        parts.append(micro_batch_of(share_batch, numbers, multiple, context_rank, num_context_ranks))
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


def filled_lengths(lengths: torch.Tensor, num_context_ranks: int) -> torch.Tensor:
    """Tokens of each trajectory with the fillers behind it: int64 [N]; the lengths themselves for one context rank."""
    unit = segment_multiple(num_context_ranks)
    return -(-lengths // unit) * unit


def micro_batch_of(
    share_batch: PackedBatch,
    numbers: Sequence[int],
    multiple: int = 1,
    context_rank: int = 0,
    num_context_ranks: int = 1,
) -> MicroBatch:
    """The micro-batch of some trajectories of a share, as one context rank sees it. Arguments as `share_of`."""
    batch = share_batch.select(list(numbers))
    lengths = filled_lengths(batch.lengths(), num_context_ranks)
    num_filled = int(lengths.sum())
    whole = math.lcm(segment_multiple(num_context_ranks), num_context_ranks * multiple)
    rest = -num_filled % whole if num_filled else whole
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    place = torch.arange(batch.num_tokens) + torch.repeat_interleave(starts[:-1] - batch.starts[:-1], batch.lengths())
    token_ids = batch.token_ids.new_zeros(num_filled + rest)
    token_ids[place] = batch.token_ids
    about = torch.full_like(token_ids, -1)
    about[place] = to_decoder(torch.arange(batch.num_tokens), batch.starts, fill=-1)
    segment_starts = torch.unique(torch.cat([starts, starts.new_tensor([num_filled + rest])]))  # no empty segment
    held = context_index(segment_starts, num_context_ranks)[context_rank]
    token_index = share_batch.token_index(list(numbers))
    return MicroBatch(batch, token_index, segment_starts, token_ids[held], about[held])
