"""What a run has counted besides its ledger. Saved with a checkpoint, so that a resumed run goes on counting."""

import msgspec


class Totals(msgspec.Struct, kw_only=True):
    """Counts since the first start of a run."""

    lag_max: int = 0
    num_trained_tokens: int = 0
    num_trained_tokens_lag_ge1: int = 0
    num_across_pushes: int = 0  # trajectories whose tokens were written by more than one version
    num_pushes: int = 0
    num_failed_pushes: int = 0
    num_taken_out: int = 0  # times that an engine ceased to answer, before this start
    num_reissued: int = 0  # requests that were asked again of another engine, before this start
    num_in_flight_at_pushes: int = 0  # prompts whose episodes ran during some push
    ids_in_flight_at_pushes: set[str] = set()  # those of them that may not have ended yet
