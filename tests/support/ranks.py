"""Runs a function as N real ranks (gloo, forked): the heavy imports are paid once, in the parent."""

import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.parent import end_with_parent


class RankFailure(AssertionError):
    """A rank raised or hung; carries that rank's traceback."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Fork `world_size` ranks, call function(*args) in each under torchrun's variables, return what they returned.

    All ranks are stopped as soon as one fails or the time is up. Results are pickled, so return tensors or numbers.
    Raises: RankFailure.
    """
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        gc.freeze()  # a collection in a rank would copy every page of the parent's objects
        pids = [_fork(rank, world_size, port, Path(folder), timeout_s, function, args) for rank in range(world_size)]
        failure = _wait(pids, timeout_s)
        if failure is not None:
            logs = [p.read_text() for p in sorted(Path(folder).glob("*.error")) + sorted(Path(folder).glob("*.stacks"))]
            raise RankFailure(failure + "\n" + "\n".join(logs))
        return [pickle.loads((Path(folder) / f"{rank}.result").read_bytes()) for rank in range(world_size)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _fork(
    rank: int, world_size: int, port: int, folder: Path, timeout_s: float, function: Callable, args: tuple
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    end_with_parent()
    stacks = (folder / f"{rank}.stacks").open("w")  # of a rank that hangs
    faulthandler.dump_traceback_later(0.9 * timeout_s, file=stacks)
    try:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME="lo",
        )
        import torch

        torch.set_num_threads(1)
        result = function(*args)
        (folder / f"{rank}.partial").write_bytes(pickle.dumps(result))
        (folder / f"{rank}.partial").rename(folder / f"{rank}.result")
        # Rank 0 holds the store at which slower ranks may still be meeting. The parent ends this if one fails.
        while rank == 0 and len(list(folder.glob("*.result"))) < world_size:
            time.sleep(0.005)
        code = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no atexit of the parent's (pytest's) in a rank


def _wait(pids: list[int], timeout_s: float) -> str | None:
    """None when all ranks ended well; otherwise why not, with the others stopped."""
    deadline = time.monotonic() + timeout_s
    running = set(pids)
    failure = None
    while running and failure is None:
        for pid in sorted(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                running.discard(pid)
                if status != 0:
                    failure = f"rank {pids.index(pid)} ended with status {os.waitstatus_to_exitcode(status)}"
        if running and time.monotonic() > deadline:
            failure = f"ranks {sorted(pids.index(p) for p in running)} still ran after {timeout_s:.0f} s"
        time.sleep(0.02)
    if failure is not None:
        time.sleep(0.5)  # peers of a failed rank write their own errors
    for pid in running:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
    return failure
