"""How a trainer rank ends, and how the others and whoever started them learn why.

Most faults meet every rank: rank 0 speaks first. A fault of one rank travels to the others through the watch
(`parallel/watch.py`), which also notices ranks and hosts that vanish; then every rank that still lives records the same
cause for the program that started it, and ends.
"""

import faulthandler
import os
import sys
import time
from types import TracebackType
from typing import Self

from megatron_sao.cli.failure import Failure, record_failure
from megatron_sao.config import Config
from megatron_sao.errors import ProtocolError, SaoError

REPEAT_AFTER_S = 3.0  # what every rank meets rank 0 says first; its end makes the others end


class RankEnd:
    """Entered around all that a rank does; passes every error on."""

    def __enter__(self) -> Self:
        self._watch = None
        return self

    def watch(self, config: Config, host: str) -> None:
        """Meet the other ranks and watch them from now on. Collective: every rank of the world.

        Args:
            host: address of rank 0 that all ranks can reach.
        """
        from megatron_sao.parallel.watch import PeerWatch

        self._config = config.parallel
        self._watch = PeerWatch(
            host,
            join_timeout_s=self._config.join_timeout_s,
            lost_after_s=self._config.lost_after_s,
            on_loss=_end_now,
        )

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, Exception):
            cause = self._explain(error)
            if isinstance(cause, SaoError) and int(os.environ.get("RANK", 0)):
                time.sleep(REPEAT_AFTER_S)
            message = str(cause) if isinstance(cause, SaoError) else f"{type(cause).__name__}: {cause}"
            record_failure(Failure(getattr(cause, "exit_code", 1), message))
            if self._watch:
                self._watch.close(message)
            if cause is not error:
                raise cause from error
        elif error is None and self._watch:
            self._watch.close()

    def _explain(self, error: Exception) -> Exception:
        """A collective that breaks is a consequence. The watch, if it knows the cause, ends this process meanwhile."""
        if self._watch is None:
            return error
        from megatron_sao.parallel.watch import is_broken_collective

        if not is_broken_collective(error):
            return error
        time.sleep(self._config.lost_after_s + REPEAT_AFTER_S + 1.0)
        return ProtocolError(
            f"ranks of the trainer could not exchange tensors ({str(error).splitlines()[0]}), though rank 0 reaches the"
            f" hosts of all: a rank hangs or needs more than parallel.timeout_s = {self._config.timeout_s:g} s for its"
            " part, or the way between two other hosts is cut"
        )


def _end_now(loss: str) -> None:
    """Effect: ends this process, with the message and exit code of a ProtocolError; its log says where it was."""
    faulthandler.dump_traceback()
    print(f"error: {loss}", file=sys.stderr, flush=True)
    record_failure(Failure(ProtocolError.exit_code, loss))
    os._exit(ProtocolError.exit_code)
