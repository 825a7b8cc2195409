"""Counts the memory that torch operations take, exactly and on any device, without looking at the process."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Bytes of the storages that operations create while the mode is on; what existed before is not counted.

    Works on fake tensors too (torch._subclasses.FakeTensorMode), whose storages have a size and no memory: so sizes
    can be counted that the machine does not have. What one operation takes and gives back inside is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        for storage in _storages((args, kwargs)):
            self._know(storage, 0)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            self._know(storage, storage.nbytes())
        return result

    def _know(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= num_bytes


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
