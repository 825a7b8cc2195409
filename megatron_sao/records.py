"""The typed records that travel between processes, and the one codec that puts them on the wire.

Owns: `Prompt`, `Turn`, `Trajectory` and the trainer <-> scheduler messages. Invariants:
- index rule: entry i of every per-token array is about token i (`logp_sampler[i]` scores `token_ids[i]`);
- `policy_version` counts the weight pushes that the sampler's weights contain: 0 = the initial weights;
- arrays are numpy, not lists, so that a batch of 128 trajectories of 128k tokens is a few hundred MB, not objects.
No torch, no Megatron: the scheduler and a laptop import this.
"""

from typing import Any

import msgspec
import numpy as np

NO_VERSION = -1  # version_t of a token that no sampler wrote (observation)

# Phases of a run, as they stand in messages and metrics.
PRETRAIN = "value_pretrain"  # one batch, many value updates, each with a StepReport; the next request closes the batch
WARMUP = "value_warmup"  # steps of the value model alone: the policy and its version stay
TRAIN = "train"  # steps of both models; the one phase that moves the version

# How a run ends well.
FINISHED = "finished"
STOPPED = "stopped"  # before its end, with a checkpoint


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One issued task. The same row of a data set issued in two epochs makes two prompts."""

    prompt_id: str  # unique in a run: "train/e0/17"
    environment: str  # name in the environment registry
    domain: str  # "reasoning" | "coding" | "agentic": selects the DIS bounds
    task: dict[str, Any]  # what the environment needs; JSON-able; may hold the expected answer


class VersionSpan(msgspec.Struct, frozen=True):
    """Sampled tokens [start, end) of one turn were written by weights `policy_version`."""

    start: int
    end: int
    policy_version: int


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange: observation tokens put into the context, then the action tokens that the sampler wrote."""

    observation_ids: list[int]  # before the action; of the first turn: the rendered prompt
    action_ids: list[int]  # sampled, exactly as the engine returned them
    logp_sampler: list[float]  # one per action token: at the sampling temperature, full support
    version_spans: list[VersionSpan]  # tile [0, len(action_ids))
    stop_reason: str  # the engine's: "stop" | "length"
    suffix_ids: list[int] = []  # in context after the action but not sampled (an appended end-of-turn): never trained
    reward: float | None = None  # per-turn reward; None = this turn gives none


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One episode as one flat token sequence of T tokens, ready to train on."""

    prompt: Prompt
    token_ids: np.ndarray  # int64 [T]
    action_mask: np.ndarray  # bool [T]; True = written by the sampler
    logp_sampler: np.ndarray  # float32 [T]; 0.0 off the mask
    reward_t: np.ndarray  # float32 [T]; outcome reward on the last action token, turn rewards on their turn's last
    version_t: np.ndarray  # int32 [T]; NO_VERSION off the mask
    turn_t: np.ndarray  # int32 [T]; index of the turn a token belongs to
    reward: float  # outcome reward (turn rewards excluded)
    is_cut: bool  # True = ended by a length limit, by the engine's stop reason or for want of room
    started_s: float  # unix time at which the first request was sent
    finished_s: float  # unix time at which the environment ended the episode
    metrics: dict[str, float] = {}  # what the environment wants reported, e.g. {"tool_calls": 1}

    @property
    def num_tokens(self) -> int:
        """T: observations and actions."""
        return len(self.token_ids)

    @property
    def num_action_tokens(self) -> int:
        """Tokens that the sampler wrote."""
        return int(self.action_mask.sum())

    @property
    def oldest_version(self) -> int:
        """The oldest policy_version that wrote one of its action tokens (freshness is measured on it)."""
        return int(self.version_t[self.action_mask].min())


# ---- trainer -> scheduler: each message is answered by exactly one message -------------------------------------


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First message of a trainer. Answer: Welcome."""

    policy_version: int  # of the weights that the trainer holds; its first PushRequest brings the engines to it
    num_trainer_ranks: int
    plan: bytes  # transport.plan.PushPlan, encoded; an engine gets it when it joins the weight group
    plan_hash: str


class NeedBatch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer: Batch, or PushWanted. Lag is measured against `policy_version`, the version that trains the batch."""

    step: int
    phase: str  # PRETRAIN | WARMUP | TRAIN
    num_trajectories: int
    policy_version: int


class PushRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bring every engine to `policy_version`: asked again after each part of a push, until the answer is PushDone.

    Answer: FormGroup, or PushGo as soon as engines are paused and receiving, or PushDone.
    """

    policy_version: int  # the version being published; never lower than what engines hold
    has_group: bool  # False = the trainer has no weight group, or has left the one it had


class GroupOpen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The trainer ranks wait in a new weight group. Answer: Ack once every engine has joined, or PushFailed."""

    policy_version: int  # of the push
    master_address: str  # where trainer rank 0 holds the TCPStore of the group
    master_port: int


class PushSent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All buckets are out. Answer, after every engine of the group verified, published and resumed: PushDone, or Ack
    when others still lack the version (PushRequest comes next); or PushFailed.
    """

    policy_version: int
    fault: str = ""  # not empty = sending failed on some rank, all ranks have left the group


class EvalRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer: EvalResult of the held-out prompts under the weights the engines hold now, or PushWanted."""

    name: str  # "before" | "after" | "step-40"


class StepReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What one step did. Answer: Ack, after the ledger has marked the batch as trained (or dropped: no signal)."""

    step: int
    phase: str
    policy_version: int  # version after the step
    is_trained: bool  # False = "no signal": nothing was updated
    metrics: dict[str, float]


class SaveState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write what a restart needs of the scheduler, as of now, into `folder`. Answer: Ack once its files are on disk."""

    step: int  # after which the checkpoint is taken
    folder: str  # exists; the scheduler's own part of a checkpoint


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The run is over (or failed, with the reason). Answer: Ack; the scheduler then writes its summary and ends."""

    reason: str  # FINISHED, STOPPED (saved before its end), or the error
    result: dict[str, float] = {}


# ---- scheduler -> trainer --------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to Hello."""

    num_engines: int  # that the scheduler knows of, also those that do not answer now


class Batch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to NeedBatch."""

    step: int
    trajectories: list[Trajectory]
    metrics: dict[str, float]  # e.g. {"schedule/dropped_stale": 0.0, "schedule/wait_s": 0.4, "schedule/buffered": 12.0}


class FormGroup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to PushRequest: leave the weight group you have, open a new one of this size, and say GroupOpen."""

    num_engines: int
    num_workers: int  # of all these engines; they come after the trainer ranks
    is_push_due: bool  # whether they lack the version; else they only join


class PushGo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to PushRequest: engines are paused and receive."""

    policy_version: int


class PushFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to GroupOpen and PushSent: it came to nothing. Leave the weight group and say PushRequest again."""

    reason: str


class PushDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to PushRequest and PushSent: every engine that answers serves the version."""

    policy_version: int
    metrics: dict[str, float]  # {"push/pause_s": ..., "push/transfer_s": ..., "push/load_s": ..., ...}


class PushWanted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to NeedBatch and EvalRequest: no engine serves, but one waits for weights. Push, then ask again."""


class StopWanted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to NeedBatch and EvalRequest: the run shall end here. Save, and say Goodbye(STOPPED)."""

    reason: str  # who wants it: "SIGTERM", "the file stop"


class EvalResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to EvalRequest."""

    name: str
    pass_rate: float  # share of episodes with reward >= 1
    mean_reward: float
    num_episodes: int


class Ack(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to GroupOpen, PushSent, StepReport and Goodbye: heard, done."""


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to anything when the scheduler cannot go on; the trainer raises ProtocolError(reason) on all ranks."""

    reason: str


TrainerMessage = Hello | NeedBatch | PushRequest | GroupOpen | PushSent | EvalRequest | StepReport | SaveState | Goodbye
SchedulerMessage = (
    Welcome | Batch | FormGroup | PushGo | PushFailed | PushDone | PushWanted | StopWanted | EvalResult | Ack | Abort
)


# ---- the wire --------------------------------------------------------------------------------------------------


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, np.ascontiguousarray(value).tobytes()]
    raise TypeError(f"cannot put {type(value).__name__} into a record")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, raw = value
        return np.frombuffer(raw, dtype=np.dtype(dtype))
    raise TypeError(f"no record field of type {kind}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(record: msgspec.Struct) -> bytes:
    """One record as msgpack; numpy arrays as (dtype, bytes)."""
    return _encoder.encode(record)


def decode(raw: bytes, kind: Any) -> Any:
    """Inverse of `encode`. Raises msgspec.ValidationError when the bytes do not fit `kind`. Arrays are read-only."""
    return msgspec.msgpack.decode(raw, type=kind, dec_hook=_decode_array)
