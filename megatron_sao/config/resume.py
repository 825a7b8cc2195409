"""Which settings may change when a run goes on from a checkpoint, and which would make its state meaningless."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_sao.checkpoints import CONFIG_FILE
from megatron_sao.config.config import Config
from megatron_sao.config.keys import leaf_keys
from megatron_sao.config.load import load_config
from megatron_sao.errors import ConfigError

# Key, or all keys below "section." -> why it stays. The first that fits counts.
_FIXED = {
    "model.path": "both models began with that folder; if it has moved, leave a link to it where it was",
    "model.": "both models in the checkpoint are of that kind",
    "warm_start.cache_folder": "",
    "warm_start.": "both models in the checkpoint began with it",
    "task.prompts_file": "trained prompts are counted in its order; if it has moved, leave a link to it where it was",
    "task.": "which prompts were trained is counted in its order",
    "run.seed": "which prompts were trained is counted in its order",
    # top_p and top_k have one value each; [engine] may change: what it makes of the logits, the log-probs contain.
    "sampling.temperature": "finished trajectories wait in the checkpoint, with log-probs at the temperature they had",
    "sampling.rollouts_per_prompt": "the rollouts of each prompt are counted",
    "algo.baseline": "the checkpoint holds the state of that baseline",
    "policy.mtp_loss_weight": "the checkpoint holds MTP layers and their optimizer state, or it does not",
    "value.loss": "it says what the outputs of the value head mean",
    "value.hl_gauss_bins": "it says what the outputs of the value head mean",
    "value.hl_gauss_min": "it says what the outputs of the value head mean",
    "value.hl_gauss_max": "it says what the outputs of the value head mean",
    "value.groups.": "it says which tensors have optimizer state",
}
# Of a fixed key, what of its value has to stay.
_ASPECTS: dict[str, Callable[[Any], Any]] = {
    "policy.mtp_loss_weight": bool,
    "model.path": lambda path: path and Path(path).resolve(),
    "task.prompts_file": lambda path: path and Path(path).resolve(),
}


@dataclass(frozen=True)
class Change:
    """A setting that is another one than when the checkpoint was written."""

    key: str
    saved: Any
    given: Any

    def __str__(self) -> str:
        return f"{self.key} = {self.given!r}, was {self.saved!r}"


def changes_since(checkpoint: Path, given: Config) -> list[Change]:
    """What is configured now other than in a checkpoint that a run shall go on from.

    Raises: ConfigError naming every change that would make the checkpoint's state meaningless, with both values.
    """
    return changes_between(load_config(checkpoint / CONFIG_FILE), given, checkpoint.name)


def changes_between(saved: Config, given: Config, name: str = "the checkpoint") -> list[Change]:
    """The same, of two configurations."""
    changes = []
    for key in leaf_keys():
        change = Change(key.path, _value(saved, key.path), _value(given, key.path))
        if change.saved != change.given:
            changes.append(change)
    refused = [(change, why) for change in changes if (why := _why_fixed(change))]
    if refused:
        lines = [f"{change.key} = {change.given!r}, saved with {change.saved!r}: {why}" for change, why in refused]
        first = f"{name} cannot be resumed with these settings; set them back, or begin a new run:"
        raise ConfigError("\n  ".join([first, *lines]))
    return changes


def _why_fixed(change: Change) -> str:
    """Why a change is refused; "" = it is not."""
    for fixed, why in _FIXED.items():
        if change.key == fixed or (fixed.endswith(".") and change.key.startswith(fixed)):
            is_rate = change.key.endswith(".lr_multiplier")
            aspect = _ASPECTS.get(change.key, lambda value: value)
            return "" if is_rate or aspect(change.saved) == aspect(change.given) else why
    return ""


def _value(config: Config, path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = getattr(found, name)
    return found
