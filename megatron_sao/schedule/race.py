"""Waiting for one thing while others may put an end to it."""

import asyncio
from collections.abc import Awaitable


async def first_of[T](work: Awaitable[T], *others: asyncio.Future[T]) -> T:
    """The result of `work`, or of the first of `others` that is done before it.

    Effect: work that is not done by then is cancelled, and has ended on return. The others are left alone.
    Raises: what the first one raised.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
        return next(future for future in (task, *others) if future.done()).result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
