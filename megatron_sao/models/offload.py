"""Policy and value take turns on the same memory: the one that is not at work sleeps in host memory.

Owns which of the models is awake. A sleeping model keeps every tensor object, view and name; only the storages under
them are emptied. So nothing that points into them has to be told: parameters (views of Megatron's parameter buffers, or
of their own), float32 weights that the optimizer updates in place, bfloat16 weights' float32 masters, Adam's moments.
Gradients are forgotten, since every update starts from zero. Buffers (rope tables, expert bias) are small and stay.

megatron-core 0.19 has hooks of its own, which are not used: `optimizer.offload_to_cpu` gives float32 parameters a new
tensor on the way back, so that Adam would go on updating weights that the model no longer sees (the value head is
float32 in every run); `offload_to_cpu` of the buffers leaves out frozen parameters and, on a CPU, keeps no copy.
"""

from collections.abc import Iterator

import torch

from megatron_sao.models.optimizer import TrainedModel


class Turns:
    """Whose turn it is. Without offloading taking a turn does nothing: all models stay where they are."""

    def __init__(self, offloads: bool = False):
        self._offloads = offloads
        self._awake: TrainedModel | None = None
        self._memories: dict[int, _HostMemory] = {}  # by id of the model

    def take(self, model: TrainedModel) -> None:
        """Wake `model` after putting the one that is awake to sleep. No collective.

        Effect: a model that takes its first turn joins; until then nothing of it is moved.
        """
        if not self._offloads or model is self._awake:
            return
        self.rest()
        memory = self._memories.setdefault(id(model), _HostMemory(model))
        memory.wake()
        self._awake = model

    def rest(self) -> None:
        """Put the model that is awake to sleep, which makes room for one that is about to be built."""
        if self._awake is not None:
            self._memories[id(self._awake)].sleep()
            self._awake = None


class _HostMemory:
    """Where the bytes of one model are while it sleeps. Kept while it is awake too: pinned memory is slow to get."""

    def __init__(self, model: TrainedModel):
        self._model = model
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []  # (of the model, in host memory)
        self._gradients: list[tuple[torch.Tensor, int]] = []  # (of the buffers, bytes), while asleep

    def sleep(self) -> None:
        self._model.optimizer.zero_grad()  # the optimizer's own references to gradients
        copies = {device._cdata: (device, host) for device, host in self._copies}
        self._copies = []
        for storage in _distinct(_lasting_tensors(self._model)):
            _, host = copies.get(storage._cdata, (None, None))
            if host is None or host.nbytes() != storage.nbytes():
                host = _host_storage(storage.nbytes())
            host.copy_(storage, non_blocking=True)
            self._copies.append((storage, host))
        torch.cuda.synchronize()  # the copies are whole before their sources go
        for storage, _ in self._copies:
            storage.resize_(0)
        for buffer in self._model.grad_buffers():
            gradient = buffer.grad_data
            self._gradients.append((gradient, gradient.untyped_storage().nbytes()))
            gradient.untyped_storage().resize_(0)
        torch.cuda.empty_cache()  # the other model's tensors have other sizes

    def wake(self) -> None:
        for storage, host in self._copies:
            storage.resize_(host.nbytes())
            storage.copy_(host, non_blocking=True)
        for gradient, num_bytes in self._gradients:
            gradient.untyped_storage().resize_(num_bytes)
            gradient.zero_()
        self._gradients = []
        torch.cuda.synchronize()


def _lasting_tensors(model: TrainedModel) -> Iterator[torch.Tensor]:
    """All that must survive between two updates; several may share a storage."""
    for chunk in model.chunks:
        yield from chunk.parameters()
    for buffer in model.grad_buffers():
        if buffer.param_data is not None:
            yield buffer.param_data
    for optimizer in model.optimizers():
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def _distinct(tensors: Iterator[torch.Tensor]) -> list[torch.UntypedStorage]:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in storages.values() if storage.nbytes()]


def _host_storage(num_bytes: int) -> torch.UntypedStorage:
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if torch.cuda.is_available():
        # Pinned, a GPU copies at the full rate of the bus. Not by torch's own allocator (2.13): it rounds each request
        # up to a power of two, which is up to twice the host memory that the plan counts.
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0)))
    return memory.untyped_storage()
