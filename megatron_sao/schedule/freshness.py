"""How old a trajectory may be when it is trained on. Pure integers; every rule about lag stands here and nowhere else.

Invariants:
- lag is measured when a step consumes a trajectory, never when it was sampled or queued: waiting makes it older;
- a trajectory is as old as the OLDEST of its action tokens, however many newer ones follow;
- versions only grow, so a negative lag means that a process counts wrongly. It is an error, never "very fresh".
"""

from megatron_sao.errors import ProtocolError


def lag(trained_by_version: int, written_by_version: int) -> int:
    """Number of weight pushes between the weights that wrote a token and the version that trains on it.

    Args:
        trained_by_version: policy_version of the step that consumes the token, >= 0.
        written_by_version: policy_version of the sampler's weights that wrote it, >= 0.

    Raises:
        ProtocolError: the token claims weights newer than those being trained (or a version below 0).
    """
    if written_by_version < 0:
        raise ProtocolError(f"a sampled token carries policy_version {written_by_version}; versions start at 0")
    if written_by_version > trained_by_version:
        raise ProtocolError(
            f"a token was written by policy_version {written_by_version}, but the step trains version "
            f"{trained_by_version}: lag {trained_by_version - written_by_version} is impossible; "
            "the version counter of the trainer fell, or an engine was given a wrong one"
        )
    return trained_by_version - written_by_version


def is_fresh(trained_by_version: int, oldest_version: int, max_staleness: int) -> bool:
    """Whether a trajectory whose oldest action token was written by `oldest_version` may be trained on.

    lag(trained_by_version, oldest_version) <= max_staleness

    Raises:
        ProtocolError: negative lag (see `lag`).
    """
    return lag(trained_by_version, oldest_version) <= max_staleness


def capacity(
    *, policy_version: int, batch_trajectories: int, max_staleness: int, num_accepted: int, num_running: int
) -> int:
    """How many more prompts may be issued now so that, at an even pace, none of them is stale when its turn comes.

    (max_staleness + policy_version + 1) * batch_trajectories - (num_accepted + num_running)

    Each version consumes one batch, so the last trajectory admitted by this rule is consumed `max_staleness` pushes
    after it was issued.

    Args:
        policy_version: version the engines hold, >= 0.
        batch_trajectories: trajectories one step consumes.
        max_staleness: largest lag that is trained on.
        num_accepted: trajectories since version 0 that steps have consumed or that wait in the buffer. Dropped ones do
            not count. After a restart it must be restored together with the version, or capacity grows without bound.
        num_running: episodes in flight.

    Returns:
        The number of prompts; 0 or negative = none.
    """
    return (max_staleness + policy_version + 1) * batch_trajectories - (num_accepted + num_running)


def num_to_issue(*, capacity: int, num_running: int, max_in_flight: int, num_buffered: int, num_needed: int) -> int:
    """How many prompts the dispatcher starts now.

    min(capacity, max_in_flight - running, max(max_in_flight, needed) - running - buffered)

    The last term keeps no more prompts on the way than run at the same time, or than the next step needs: whatever is
    started beyond that while the trainer is busy only grows old in the queue.

    Args:
        capacity: result of `capacity`.
        num_running: episodes in flight.
        max_in_flight: episodes that may run at the same time.
        num_buffered: finished trajectories that wait.
        num_needed: trajectories of the next step.

    Returns:
        The number of prompts, >= 0.
    """
    ahead = max(max_in_flight, num_needed) - num_running - num_buffered
    return max(0, min(capacity, max_in_flight - num_running, ahead))
