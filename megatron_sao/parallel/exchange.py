"""Plain exchanges between ranks that are no part of Megatron: objects, sums, values of the last pipeline stage."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def world_rank() -> int:
    """This process's rank in the trainer's world."""
    return dist.get_rank()


def world_size() -> int:
    """Ranks of the trainer's world."""
    return dist.get_world_size()


class ObjectGroup:
    """The whole world with a timeout of its own, for what may take longer than a collective of the model may."""

    def __init__(self, timeout_s: float):
        """Collective: the whole world."""
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def wait(self) -> None:
        """Return once every rank is here. Collective: the whole world."""
        dist.barrier(group=self._group)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """`value` of rank `source`, on every rank. Collective: the whole world."""
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]

    def collect(self, value: Any) -> list[Any] | None:
        """Every rank's `value`, by rank, on rank 0; None elsewhere. Collective: the whole world."""
        out = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(value, out, dst=0, group=self._group)
        return out

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, by rank, on every rank. Collective: the whole world."""
        out: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(out, value, group=self._group)
        return out


def broadcast_tensor(tensor: torch.Tensor, source: int) -> None:
    """Fill `tensor` (contiguous, equal shapes and dtypes) with rank `source`'s. Collective: the whole world."""
    dist.broadcast(tensor, src=source)


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


def merge_over_data(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Named statistics over the data-parallel ranks: those called `max_...` by maximum, all others by sum.

    The ranks of a context axis have the same share, with whole trajectories: each hands in the statistics of all of it,
    and they are counted once.

    Args: named: any shapes; the same names and shapes on every rank, also on one without tokens.
    Returns: float64 on the CPU, equal on every rank. Collective: the data axis.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=False)
    merged = {name: value.detach().to("cpu", torch.float64) for name, value in named.items()}
    if group.size() == 1:
        return merged
    for is_max, op in ((False, dist.ReduceOp.SUM), (True, dist.ReduceOp.MAX)):
        names = sorted(name for name in merged if name.startswith("max_") == is_max)
        if names:
            flat = torch.cat([merged[name].flatten() for name in names]).to(_device())
            dist.all_reduce(flat, op=op, group=group)
            parts = flat.cpu().split([merged[name].numel() for name in names])
            merged |= {name: part.view(merged[name].shape) for name, part in zip(names, parts, strict=True)}
    return merged


def whole_from_pieces(piece: torch.Tensor | None, start: int, num_elements: int, group: Any) -> torch.Tensor:
    """A float32 vector of which each rank of `group` has a piece, whole on all of them, bit by bit.

    Args:
        piece: float32 [any], elements [start, start + its length); None = this rank has none. Together the pieces cover
            the vector once.
    Returns: float32 [num_elements], on the device of the model. Collective: every rank of `group`.
    """
    whole = torch.zeros(num_elements, dtype=torch.float32, device=_device())
    if piece is not None:
        whole[start : start + len(piece)] = piece
    dist.all_reduce(whole.view(torch.int32), group=group)  # as integers: adding 0.0 would make 0.0 of -0.0
    return whole


def from_last_stage(tensor: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
    """A float32 tensor that only the last pipeline stage has, on every stage.

    Args:
        tensor: [*shape] on the last stage; ignored (may be None) elsewhere.
    Raises: ValueError on the last stage when the tensor has another shape (a broadcast would mix up its numbers).
    Collective: every rank of the pipeline axis, also one without tokens.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        tensor = torch.empty(shape, dtype=torch.float32, device=_device())
    elif tensor is None or tuple(tensor.shape) != tuple(shape):
        found = "nothing" if tensor is None else list(tensor.shape)
        raise ValueError(f"the last pipeline stage gives {found} where {list(shape)} is expected")
    tensor = tensor.to(_device(), torch.float32).contiguous()  # NCCL takes no tensor of the CPU
    if group.size() == 1:
        return tensor
    dist.broadcast(tensor, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return tensor
