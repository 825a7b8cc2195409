"""The random number generators of a rank, taken down and put back."""

import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel


def random_states() -> dict[str, Any]:
    """Of Python, numpy, torch (CPU, GPU) and Megatron's tracker: tensors, numbers and lists only."""
    kind, keys, *numpy_rest = np.random.get_state()
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *numpy_rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Effect: what `random_states` took down is how every generator goes on."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *numpy_rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *numpy_rest))
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["megatron"])
