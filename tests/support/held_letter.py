"""FirstLetter, whose episodes do not begin while a file exists: so a test can let the trainer wait for a batch."""

import asyncio
from pathlib import Path

from megatron_sao.rollout.environment import Message, Task
from tests.support.first_letter import FirstLetter, FirstLetterEpisode


class HeldLetter(FirstLetter):
    def __init__(self, hold_file: str) -> None:
        self._hold_file = Path(hold_file)

    def start(self, task: Task) -> "HeldLetterEpisode":
        return HeldLetterEpisode(task, self._hold_file)


class HeldLetterEpisode(FirstLetterEpisode):
    def __init__(self, task: Task, hold_file: Path) -> None:
        super().__init__(task)
        self._hold_file = hold_file

    async def begin(self) -> list[Message]:
        while self._hold_file.exists():
            await asyncio.sleep(0.05)
        return await super().begin()
