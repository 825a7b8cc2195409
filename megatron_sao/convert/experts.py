"""Experts that a HF folder holds as one tensor, shown as the separate tensors that all other folders hold.

`mlp.experts.gate_up_proj` [E, 2I, H], in which every expert's gate rows stand above its up rows, and
`mlp.experts.down_proj` [E, H, I] become `mlp.experts.NUMBER.{gate,up,down}_proj.weight`, so that nothing else needs to
know. The trainer and the engine's side of a push list a folder by this one rule: their names must agree.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_sao.errors import CheckpointError

_FUSED = re.compile(r"(.+\.mlp\.experts\.)(gate_up_proj|down_proj)(?:\.weight)?")


@dataclass(frozen=True)
class Place:
    """Where a tensor stands. `expert` is -1 for a tensor of its own, else its matrix in a tensor of all experts."""

    name: str  # of the tensor in the file
    shape: tuple[int, ...]
    expert: int = -1
    first_row: int = 0  # within the expert's matrix


def one_by_one(stored: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """HF name -> place of every tensor, those of all experts taken apart.

    Args: stored: name -> shape of every tensor in the folder's files.
    Raises: CheckpointError where two stored tensors give the same one, or rows do not fall into gate and up evenly.
    """
    found: dict[str, Place] = {}
    for stored_name, shape in stored.items():
        for name, place in _places(stored_name, shape):
            if name in found:
                raise CheckpointError(f"{name} is there twice: in {found[name].name} and in {stored_name}")
            found[name] = place
    return found


def _places(stored_name: str, shape: tuple[int, ...]) -> list[tuple[str, Place]]:
    fused = _FUSED.fullmatch(stored_name)
    if not fused or len(shape) != 3:
        return [(stored_name, Place(stored_name, shape))]
    num_experts, rows, columns = shape
    parts = ["gate_proj", "up_proj"] if fused[2] == "gate_up_proj" else ["down_proj"]
    if rows % len(parts):
        raise CheckpointError(f"{stored_name} of shape {list(shape)} has {rows} rows: no gate and up projection")
    rows //= len(parts)
    return [
        (f"{fused[1]}{expert}.{part}.weight", Place(stored_name, (rows, columns), expert, number * rows))
        for expert in range(num_experts)
        for number, part in enumerate(parts)
    ]
