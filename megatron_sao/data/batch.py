"""The packed batch and the one index rule.

Shapes: N trajectories laid end to end make S packed tokens; `starts` int64 [N+1] are their cumulative lengths.
Index rule, everywhere in this project: entry i of a per-token tensor is ABOUT token i, given the tokens before it in
its trajectory. `logp[i]` scores token i, `value[i]` judges the prefix before token i, `advantage[i]` belongs to the
choice of token i.
A decoder's output at position j, however, is about token j + 1. `to_decoder` is the only function that shifts; a
micro-batch (data/share.py) asks it once and remembers which token each decoder position is about. The first token of a
trajectory has no prefix: it is never an action.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from megatron_sao.errors import DataError
from megatron_sao.records import Trajectory


@dataclass(frozen=True)
class PackedBatch:
    """N trajectories end to end. Every per-token tensor is [S]; off the action mask only the stated filler stands."""

    token_ids: torch.Tensor  # int64
    action_mask: torch.Tensor  # bool
    logp_sampler: torch.Tensor  # float32; 0 off the mask
    reward_t: torch.Tensor  # float32; 0 where no reward was given, and off the mask
    lag_t: torch.Tensor  # int64; version that trains the batch minus version that wrote the token; 0 off the mask
    turn_t: torch.Tensor  # int64
    eps_low_t: torch.Tensor  # float32; DIS bounds of the trajectory's domain
    eps_high_t: torch.Tensor  # float32
    starts: torch.Tensor  # int64 [N+1]
    is_cut: torch.Tensor  # bool [N]
    reward_n: torch.Tensor  # float32 [N]; all rewards of the trajectory, for the arms without a value model
    group_n: torch.Tensor  # int64 [N]; trajectories of the same prompt share a number

    @property
    def num_trajectories(self) -> int:
        """N."""
        return len(self.starts) - 1

    @property
    def num_tokens(self) -> int:
        """S."""
        return len(self.token_ids)

    @property
    def num_action_tokens(self) -> int:
        """Tokens on the action mask."""
        return int(self.action_mask.sum())

    def lengths(self) -> torch.Tensor:
        """Tokens of each trajectory: int64 [N]."""
        return self.starts.diff()

    def trajectory_of_token(self) -> torch.Tensor:
        """Number of the trajectory each token belongs to: int64 [S]."""
        return torch.repeat_interleave(torch.arange(self.num_trajectories), self.lengths())

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The same batch on another device."""
        return PackedBatch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def select(self, numbers: Sequence[int]) -> "PackedBatch":
        """The batch of some of its trajectories, in the given order."""
        index = self.token_index(numbers)
        lengths = self.lengths()[list(numbers)] if numbers else self.lengths()[:0]
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        per_token = {name: getattr(self, name)[index] for name in _PER_TOKEN}
        per_trajectory = {name: getattr(self, name)[list(numbers)] for name in _PER_TRAJECTORY}
        return PackedBatch(**per_token, **per_trajectory, starts=starts)

    def token_index(self, numbers: Sequence[int]) -> torch.Tensor:
        """Positions in this batch of the tokens of some trajectories: int64, for gathering and scattering."""
        bounds = self.starts.tolist()
        spans = [torch.arange(bounds[n], bounds[n + 1]) for n in numbers]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)


_PER_TRAJECTORY = ("is_cut", "reward_n", "group_n")
_PER_TOKEN = tuple(f.name for f in fields(PackedBatch) if f.name not in ("starts", *_PER_TRAJECTORY))


def pack(
    trajectories: Sequence[Trajectory], policy_version: int, bounds: Callable[[str], tuple[float, float]]
) -> PackedBatch:
    """Lay trajectories end to end.

    Args:
        policy_version: the version that trains this batch; lag is measured against it.
        bounds: domain -> (eps_low, eps_high).
    Raises: DataError when the first token of a trajectory is an action (nothing could have scored it) or a token is
        newer than the version that trains it (negative lag).
    """

    def flat(name: str, dtype: type) -> torch.Tensor:
        parts = [np.asarray(getattr(t, name), dtype=dtype) for t in trajectories]
        return torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, dtype))

    def on_actions(x: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, x, torch.zeros((), dtype=x.dtype))  # whatever stands elsewhere (NaN) ends here

    lengths = torch.tensor([t.num_tokens for t in trajectories], dtype=torch.int64)
    mask = flat("action_mask", np.bool_)
    for trajectory in trajectories:
        name = trajectory.prompt.prompt_id
        if trajectory.num_tokens == 0 or trajectory.action_mask[0]:
            raise DataError(f"trajectory {name}: it must begin with an observation token")
        if trajectory.action_mask.any() and int(trajectory.version_t[trajectory.action_mask].max()) > policy_version:
            raise DataError(f"trajectory {name}: written by a version newer than {policy_version}, which trains it")
    eps = torch.tensor([bounds(t.prompt.domain) for t in trajectories], dtype=torch.float32).reshape(-1, 2)
    return PackedBatch(
        token_ids=flat("token_ids", np.int64),
        action_mask=mask,
        logp_sampler=on_actions(flat("logp_sampler", np.float32)),
        reward_t=on_actions(flat("reward_t", np.float32)),
        lag_t=on_actions(policy_version - flat("version_t", np.int64)),
        turn_t=flat("turn_t", np.int64),
        eps_low_t=torch.repeat_interleave(eps[:, 0], lengths),
        eps_high_t=torch.repeat_interleave(eps[:, 1], lengths),
        starts=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        is_cut=torch.tensor([t.is_cut for t in trajectories], dtype=torch.bool),
        reward_n=torch.tensor([float(t.reward_t[t.action_mask].sum()) for t in trajectories], dtype=torch.float32),
        group_n=torch.tensor(_group_numbers([t.prompt.prompt_id for t in trajectories]), dtype=torch.int64),
    )


def _group_numbers(prompt_ids: Sequence[str]) -> list[int]:
    """The rollouts of one prompt are named PROMPT#0, PROMPT#1, ...; without # each is a group of its own."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(name.split("#")[0], len(numbers)) for name in prompt_ids]


def to_decoder(about_token: torch.Tensor, starts: torch.Tensor, fill: float | int | bool = 0) -> torch.Tensor:
    """Per-token values -> per decoder position: y[j] = x[j + 1] inside a trajectory, `fill` at its last position.

    Args:
        about_token: [S] any dtype. starts: int64 [N+1].
    Returns: [S], same dtype; gradient flows through.
    """
    is_last = torch.zeros(len(about_token), dtype=torch.bool, device=about_token.device)
    is_last[starts[1:][starts.diff() > 0] - 1] = True
    moved = torch.roll(about_token, -1, dims=0)
    return torch.where(is_last, torch.full_like(moved, fill), moved)
