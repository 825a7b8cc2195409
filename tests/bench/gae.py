"""How much faster the GAE scan is than a loop over time vectorised over rows: 128 trajectories of 32k tokens.

    python tests/bench/gae.py [--threads 2]

Turns of 50 to 1,500 action tokens alternate with observations of 50 to 700; each trajectory has its own lambda, its
reward on the last action. The loop is the one the tests take as the definition, in float32. Each is the best of a few
runs, taken in turn, so that other work on the machine hits both.
"""

import argparse
import time
from collections.abc import Callable

import torch

from megatron_sao.algo.gae import length_adaptive_lambda_n, skip_observation_gae, skip_observation_gae_loop

NUM_TRAJECTORIES = 128
NUM_TOKENS = 32768
NUM_LOOP_RUNS = 2
NUM_SCAN_RUNS_PER_LOOP = 6


def turns(generator: torch.Generator) -> torch.Tensor:
    """Action mask [NUM_TRAJECTORIES, NUM_TOKENS]: a prompt, then actions and observations in turn."""
    mask = torch.zeros(NUM_TRAJECTORIES, NUM_TOKENS, dtype=torch.bool)
    for row in mask:
        position = 200
        while position < NUM_TOKENS:
            num_actions = int(torch.randint(50, 1500, (), generator=generator))
            row[position : position + num_actions] = True
            position += num_actions + int(torch.randint(50, 700, (), generator=generator))
    return mask


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    num_threads = parser.parse_args().threads
    torch.set_num_threads(num_threads)

    generator = torch.Generator().manual_seed(0)
    mask = turns(generator)
    value = torch.rand(mask.shape, generator=generator)
    reward = torch.zeros(mask.shape)
    last_action = NUM_TOKENS - 1 - mask.flip(1).int().argmax(1)
    reward[torch.arange(NUM_TRAJECTORIES), last_action] = 1.0
    lam = length_adaptive_lambda_n(mask.sum(1))
    lam_float32 = lam.float()

    def scan() -> tuple[torch.Tensor, torch.Tensor]:
        return skip_observation_gae(reward, value, mask, lam=lam)

    def loop() -> tuple[torch.Tensor, torch.Tensor]:
        return skip_observation_gae_loop(reward, value, mask, lam=lam_float32)

    scan()  # first touch of memory and threads
    scan_s, loop_s = float("inf"), float("inf")
    for _ in range(NUM_LOOP_RUNS):
        scan_s = min(scan_s, *(seconds(scan) for _ in range(NUM_SCAN_RUNS_PER_LOOP)))
        loop_s = min(loop_s, seconds(loop))
    cumsum_s = min(seconds(lambda: reward.cumsum(1)) for _ in range(NUM_SCAN_RUNS_PER_LOOP))

    exact, _ = skip_observation_gae_loop(reward.double(), value.double(), mask, lam=lam)
    max_abs_diff = float((scan()[0].double() - exact).abs().max())
    print(f"loop over time   {loop_s * 1e3:8.1f} ms")
    print(f"scan             {scan_s * 1e3:8.1f} ms")
    print(f"a plain cumsum   {cumsum_s * 1e3:8.1f} ms")
    print(
        f"BENCH gae speedup={loop_s / scan_s:.1f} loop_s={loop_s:.3f} scan_s={scan_s:.4f} cumsum_s={cumsum_s:.4f} "
        f"max_abs_diff={max_abs_diff:.1e} trajectories={NUM_TRAJECTORIES} tokens={NUM_TOKENS} "
        f"action_share={float(mask.float().mean()):.2f} threads={num_threads}"
    )


if __name__ == "__main__":
    main()
