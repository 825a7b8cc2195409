"""A child process that does not outlive the test session, however that ends."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Call in the child. Effect: it is killed when its parent has ended."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
