"""The one adapter that lets Megatron-Core run without CUDA (gloo, CPU tensors). Where CUDA is present it only makes the
rotary embedding of packed sequences quick.

Import it before the first `import megatron.core`; `parallel/__init__.py` does. It owns three groups of patches:
1. `_OnCpu`, a torch function mode: whatever asks for a cuda device gets the CPU;
2. functions of `torch.cuda` that are no tensor operations (streams, events, device identity, RNG states);
3. spots of Megatron-Core 0.19 that assume a GPU or are needlessly slow here; each names its symptom.
The mode belongs to a thread: code that runs Megatron in a second thread calls `enter()` there.
"""

import contextlib
import os
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_sao.data.context import context_index, positions_in_segments

_CPU = torch.device("cpu")


def is_needed() -> bool:
    return not torch.cuda.is_available()


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _OnCpu(TorchFunctionMode):
    """Sends every request for a cuda device to the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers sort parameters by names such as "torch.cuda.FloatTensor".
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        elif func is torch.Tensor.to and any(_names_cuda(a) for a in args[1:]):
            args = tuple(_CPU if _names_cuda(a) else a for a in args)
        return func(*args, **kwargs)


class _Event:
    """A cuda event where work is synchronous: always done."""

    def __init__(self, *args, **kwargs): ...

    def record(self, *args): ...

    def wait(self, *args): ...

    def synchronize(self): ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other) -> float:
        return 0.0


class _Stream(contextlib.nullcontext):
    """A cuda stream where work is synchronous."""

    cuda_stream = 0

    def __init__(self, *args, **kwargs):
        super().__init__()

    def wait_stream(self, *args): ...

    def wait_event(self, *args): ...

    def synchronize(self): ...

    def query(self) -> bool:
        return True

    def record_event(self, event=None):
        return event or _Event()

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


def _patch_torch_cuda() -> None:
    cuda = torch.cuda
    only_stream = _Stream()  # one object: Megatron compares current_stream() with its side streams
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = lambda *args, **kwargs: only_stream
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    cuda.synchronize = lambda *args: None
    cuda.current_device = lambda: _CPU
    cuda.device_count = lambda: 1
    # vLLM makes torch count devices to answer this (PYTORCH_NVML_BASED_CUDA_CHECK), and the one above would do.
    cuda.is_available = lambda: False
    cuda.set_device = lambda device: None
    # RNG: without these two, torch queues manual_seed until CUDA starts (never), and all of Megatron's RNG tracker
    # states are silently equal.
    cuda.default_generators = {_CPU: torch.default_generator}
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed)) and None
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _patch_all_to_all() -> None:
    """megatron-core 0.19: the token dispatcher turns split sizes into lists only for cuda tensors; gloo wants lists."""
    import torch.distributed as dist

    original = dist.all_to_all_single

    def sizes(value):
        return value.tolist() if torch.is_tensor(value) else value

    def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, *args, **kwargs):
        return original(output, input, sizes(output_split_sizes), sizes(input_split_sizes), *args, **kwargs)

    dist.all_to_all_single = all_to_all_single


def _patch_all_gather() -> None:
    """gloo gathers equal shapes only; tokens on their way to expert-tensor ranks are not equally many on each."""
    import torch.distributed as dist

    original = dist.all_gather

    def all_gather(tensor_list, tensor, group=None, async_op=False):
        rows = [len(part) if part.dim() else 0 for part in tensor_list]
        if len(set(rows)) == 1 or async_op:
            return original(tensor_list, tensor, group, async_op)
        padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(padded) for _ in rows]
        original(gathered, padded, group)
        for part, whole in zip(tensor_list, gathered, strict=True):
            part.copy_(whole[: len(part)])

    dist.all_gather = all_gather


def _patch_jit_fuser() -> None:
    """megatron-core 0.19: its jit_fuser is torch.compile: minutes for nothing here. It decorates functions while
    megatron.core is imported, and torch.compile then imports the compiler, a quarter of a trainer's start; so that
    torch.compile is a decorator that does nothing for as long as megatron.core chooses its fuser."""
    compiles, torch.compile = torch.compile, lambda function=None, **_: function or (lambda function: function)
    try:
        from megatron.core import jit
    finally:
        torch.compile = compiles
    jit.disable_jit_fuser()


def _patch_packed_rope() -> None:
    """megatron-core 0.19: unfused rope of packed sequences loops over sequences in Python with a slice assignment each
    (on a GPU it also waits for the lengths); 128 short trajectories cost more than the rest of the layer. Here: one
    gather of the angles by position. Grouped-query attention on a GPU does not come here: it has a fused kernel."""
    from megatron.core.models.common.embeddings import rope_utils

    def packed_rope(t, cu_seqlens, freqs, *args, cp_group, **kwargs):
        position = positions_in_segments(cu_seqlens)
        if cp_group.size() > 1:
            position = position[context_index(cu_seqlens, cp_group.size())[cp_group.rank()]]
        return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs[position], *args, **kwargs).squeeze(1)

    rope_utils._apply_rotary_pos_emb_thd = packed_rope


def enter() -> None:
    """Put the calling thread into the mode. Effect: for the life of the thread."""
    if is_needed():
        _OnCpu().__enter__()


def install() -> None:
    """Apply all patches once; of them only the one of packed rope where CUDA is present. Effect: process-wide."""
    if getattr(torch, "_megatron_sao_is_patched", False):
        return
    torch._megatron_sao_is_patched = True
    if is_needed():
        _run_on_cpu()
    _patch_packed_rope()


def _run_on_cpu() -> None:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron warns without it
    _patch_torch_cuda()
    _patch_all_to_all()
    _patch_all_gather()
    enter()
    _patch_jit_fuser()  # imports megatron.core, which takes functions of torch.cuda as they are then
    from megatron_sao.parallel import cpu_adam

    cpu_adam.install()
