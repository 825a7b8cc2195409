"""Plain exchanges between ranks that are no part of Megatron: objects, sums, values of the last pipeline stage."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def broadcast_object(value: Any, source: int = 0) -> Any:
    """`value` of rank `source`, on every rank. Collective: the whole world."""
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def gather_objects(value: Any) -> list[Any]:
    """Every rank's `value`, by rank, on every rank. Collective: the whole world."""
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def any_rank(flag: bool) -> bool:
    """True on every rank if `flag` is true on one. Collective: the whole world."""
    found = torch.tensor([float(flag)], device=_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())


def sum_over_data(sums: dict[str, float]) -> dict[str, float]:
    """Add up named sums over the data-parallel ranks; every rank gets the totals.

    The ranks must bring the same keys in any order (they come from the same code). Collective: the data axis.
    """
    return _reduce_over_data(sums, dist.ReduceOp.SUM)


def max_over_data(values: dict[str, float]) -> dict[str, float]:
    """Largest of named values over the data-parallel ranks. Collective: the data axis."""
    return _reduce_over_data(values, dist.ReduceOp.MAX)


def _reduce_over_data(values: dict[str, float], op: Any) -> dict[str, float]:
    names = sorted(values)
    packed = torch.tensor([float(values[n]) for n in names], dtype=torch.float64)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if names and group.size() > 1:
        packed = packed.to(_device())
        dist.all_reduce(packed, op=op, group=group)
    return dict(zip(names, packed.tolist(), strict=True))


def from_last_stage(tensor: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
    """A float32 tensor that only the last pipeline stage has, on every stage.

    Args:
        tensor: [*shape] on the last stage; ignored (may be None) elsewhere.
    Collective: every rank of the pipeline axis, also with an empty shape share.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        assert tensor is not None
        return tensor
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        tensor = torch.empty(shape, dtype=torch.float32, device=_device())
    assert tensor is not None and tuple(tensor.shape) == tuple(shape)
    tensor = tensor.contiguous()
    dist.broadcast(tensor, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return tensor
