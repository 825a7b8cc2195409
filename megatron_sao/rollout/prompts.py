"""Where prompts come from: a JSONL file or an environment's generator, in a repeatable order.

Invariants: a PromptSource is a function of its cursor (how many prompts it has issued), so that a saved cursor is its
whole state and any issued prompt can be made again from its id; training and evaluation rows never overlap.
"""

import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

import msgspec

from megatron_sao.errors import DataError
from megatron_sao.records import Prompt
from megatron_sao.rollout.chat import Chat
from megatron_sao.rollout.environment import Environment, Task, generated_task, split_of


NUM_TASKS_COMPARED = 16  # of an environment that makes its tasks: they stand for all of them


@dataclass(frozen=True)
class PromptFile:
    """The usable rows of a prompt file, and what was skipped."""

    tasks: list[Task]
    skipped: dict[int, str]  # physical line number (from 1) -> why


def read_prompt_file(path: str | Path, on_bad_line: str = "error") -> PromptFile:
    """The tasks of a JSONL file: one JSON object per line with "prompt" = text, or chat messages.

    Empty lines are ignored, lines may end in LF or CRLF, a byte order mark at the start is accepted. Whatever else a
    row holds stays in its task.

    Args:
        on_bad_line: "error" stops at the first bad line, "skip" collects them in `skipped`.
    Raises:
        DataError: no such file, a bad line (names file and line), or no usable line at all.
    """
    path = Path(path)
    try:
        # Bytes, cut at LF alone: str.splitlines would also cut at U+2028 inside a prompt.
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise DataError(f"task.prompts_file = {path} cannot be read: {error.strerror}") from error
    tasks: list[Task] = []
    skipped: dict[int, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            tasks.append(_parse_row(line))
        except ValueError as error:
            if on_bad_line != "skip":
                raise DataError(f"{path} line {number}: {error}; correct it, or set task.on_bad_line = skip") from error
            skipped[number] = str(error)
    if not tasks:
        raise DataError(f"{path} holds no usable prompt ({len(skipped)} bad lines)")
    return PromptFile(tasks, skipped)


def _parse_row(line: bytes) -> Task:
    """One row. Raises ValueError with the reason."""
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, not {type(row).__name__}")
    if "prompt" not in row:
        raise ValueError(f"the row has no \"prompt\", only {', '.join(row) or 'nothing'}")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("\"prompt\" is empty")
    elif not _are_messages(prompt):
        raise ValueError("\"prompt\" must be text, or a list of messages {\"role\": ..., \"content\": ...}")
    try:
        msgspec.msgpack.encode(row)  # a task travels in records
    except UnicodeEncodeError as error:
        raise ValueError("the text holds half of a surrogate pair, which is no character") from error
    except OverflowError as error:
        raise ValueError("a whole number needs more than 64 bits; write it as text") from error
    return row


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return row


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


async def without_overlong(
    tasks: Sequence[Task], environment: Environment, chat: Chat, max_prompt_tokens: int
) -> tuple[list[Task], int]:
    """(tasks whose episode begins with at most `max_prompt_tokens` tokens, how many were left out).

    Raises:
        DataError: none is short enough.
    """
    kept = []
    for task in tasks:
        start = await environment.start(task).begin()
        if len(chat.prompt_ids(start)) <= max_prompt_tokens:
            kept.append(task)
    if not kept:
        raise DataError(f"all {len(tasks)} prompts have more than {max_prompt_tokens} tokens; "
                        "raise sampling.max_trajectory_tokens")
    return kept, len(tasks) - len(kept)


class PromptSource:
    """Prompts of one split, in an order that depends on the seed alone. An iterator that never ends.

    Args:
        split: "train" or "eval"; a part of the prompt ids.
        name, environment: the environment and its name in the registry.
        tasks: rows of a prompt file, of which those of the split are used; None = the environment generates them.
        num_prompts: how many different prompts; 0 = all rows of the file, or an endless stream from the generator.
        shuffle: a new order in every epoch (only where there are epochs).
        rollouts_per_prompt: how often each prompt is issued in a row (more than 1 only for group baselines); the
            members of a group share their prompt_id up to "#".
    Raises:
        DataError: the split holds no prompt.
    """

    def __init__(
        self, split: str, name: str, environment: Environment, *, seed: int, tasks: Sequence[Task] | None = None,
        num_prompts: int = 0, shuffle: bool = True, rollouts_per_prompt: int = 1,
    ) -> None:
        self.split = split
        self._name = name
        self._environment = environment
        self._seed = seed
        self._shuffle = shuffle
        self._rollouts_per_prompt = rollouts_per_prompt
        self._tasks = None if tasks is None else [task for task in tasks if split_of(task) == split]
        if self._tasks is not None:
            self._tasks = self._tasks[: num_prompts or None]
            if not self._tasks:
                raise DataError(f"none of the {len(tasks)} prompts belongs to the {split} split (one in eight is held "
                                "out for evaluation, by a hash of its prompt); give more prompts")
        self.num_prompts = num_prompts if self._tasks is None else len(self._tasks)  # of one epoch; 0 = endless
        self.cursor = 0  # prompts issued so far, over all epochs
        # The order of the running epoch and of the next; an epoch of a million prompts is not shuffled for each prompt.
        self._order = lru_cache(maxsize=2)(self._order_of_epoch)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Prompt:
        """Effect: issues the next prompt."""
        return self.take(1)[0]

    @property
    def epoch(self) -> int:
        """Whole epochs issued."""
        return self._place(self.cursor)[0]

    @property
    def offset(self) -> int:
        """Prompts issued of the running epoch."""
        return self._place(self.cursor)[1]

    def take(self, num_prompts: int) -> list[Prompt]:
        """Effect: issues the next prompts, over as many epochs as it takes."""
        prompts = [self._prompt(cursor) for cursor in range(self.cursor, self.cursor + num_prompts)]
        self.cursor += num_prompts
        return prompts

    def all(self) -> list[Prompt]:
        """Every prompt of the first epoch, without issuing any: what an evaluation runs."""
        if not self.num_prompts:
            raise DataError("an endless prompt source has no last prompt; give num_prompts")
        return [self._prompt(cursor) for cursor in range(self.num_prompts * self._rollouts_per_prompt)]

    def prompt_of(self, prompt_id: str) -> Prompt:
        """The prompt issued under this id, made again (for what was in flight when a run stopped)."""
        try:
            split, epoch, rest = prompt_id.split("/")
            index, _, _ = rest.partition("#")
            if split != self.split or not epoch.startswith("e") or not index.isdecimal():
                raise ValueError(prompt_id)
            return self._make(prompt_id, int(index))
        except (ValueError, IndexError) as error:
            raise DataError(f"{prompt_id} is no prompt of the {self.split} split") from error

    def state(self) -> dict[str, int]:
        """What to save; `restore` of it continues with the next prompt."""
        return {"cursor": self.cursor, **self._identity}

    def restore(self, state: dict[str, int]) -> None:
        """Effect: continues where `state` was taken.

        Raises:
            DataError: the state belongs to other prompts or another seed, so its position means nothing here.
        """
        theirs = {key: state.get(key) for key in self._identity}
        if self._identity != theirs:
            raise DataError(f"the saved position belongs to {theirs}, this run has {self._identity}; "
                            "resume with the same task and run.seed")
        self.cursor = state["cursor"]

    @cached_property
    def _identity(self) -> dict[str, int]:
        """What a position depends on: with anything else it means other prompts."""
        tasks = self._tasks
        if tasks is None:
            tasks = [generated_task(self._environment, self.split, i, self._seed) for i in range(NUM_TASKS_COMPARED)]
        return {
            "num_prompts": self.num_prompts,
            "rollouts_per_prompt": self._rollouts_per_prompt,
            "seed": self._seed,
            "crc32": zlib.crc32(msgspec.msgpack.encode(tasks)),
        }

    def _place(self, cursor: int) -> tuple[int, int]:
        issued = cursor // self._rollouts_per_prompt
        return divmod(issued, self.num_prompts) if self.num_prompts else (0, issued)

    def _prompt(self, cursor: int) -> Prompt:
        epoch, offset = self._place(cursor)
        index = self._order(epoch)[offset] if self.num_prompts else offset
        member = f"#{cursor % self._rollouts_per_prompt}" if self._rollouts_per_prompt > 1 else ""
        return self._make(f"{self.split}/e{epoch}/{index}{member}", index)

    def _make(self, prompt_id: str, index: int) -> Prompt:
        if self._tasks is None:
            task = generated_task(self._environment, self.split, index, self._seed)
        else:
            task = self._tasks[index]
        return Prompt(prompt_id=prompt_id, environment=self._name, domain=self._environment.domain, task=task)

    def _order_of_epoch(self, epoch: int) -> Sequence[int]:
        order = list(range(self.num_prompts))
        if self._shuffle:
            random.Random(f"{self._seed}/{self.split}/order/{epoch}").shuffle(order)
        return order
