"""The conversation as token ids: the first prompt once, then only what is added after each action.

Owns: everything that knows the tokenizer during a rollout. Invariants (token in, token out):
- what the sampler wrote is never decoded and encoded again: next context = context + action ids + added ids;
- the markers between turns come from the chat template, rendered once with stand-in contents and cut at them;
- a rendered chat already holds its own special tokens, so it is encoded without adding any (no second BOS);
- an observation is encoded by itself as plain text: "<|im_end|>" inside a tool's output cannot end a turn.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_sao.errors import ConfigError, DataError
from megatron_sao.rollout.environment import Message

# Letters only: no template trims, escapes or reformats them, and no question contains them.
_QUESTION, _ACTION, _OBSERVATION = "SAOxQUESTION", "SAOxACTION", "SAOxOBSERVATION"


@dataclass(frozen=True)
class _Markers:
    """Token ids that the chat template writes around an observation."""

    closing: list[int]  # ends the action's turn; its last id is the end-of-turn token
    opening: list[int]  # from there to the observation's content
    ending: list[int]  # after the content, generation prompt included


class Chat:
    """One tokenizer's way to write conversations.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template (or without one, for plain text prompts only).
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._markers_by_role: dict[str, _Markers] = {}

    def prompt_ids(self, start: str | list[Message]) -> list[int]:
        """Token ids of the start of an episode.

        Chat messages: rendered with the generation prompt and encoded with no special tokens added. Plain text: BOS
        once in front, if the tokenizer is one that puts it there.

        Raises:
            DataError: the prompt is empty.
        """
        if not start:
            raise DataError("the prompt is empty (zero tokens)")
        if isinstance(start, str):
            ids = self._encode(start)
            bos = self._leading_bos
            ids = bos + ids if ids[:1] != bos else ids
        else:
            ids = self._encode(self._render(start, add_generation_prompt=True))
        if not ids:
            raise DataError("the prompt is empty (zero tokens)")
        return ids

    def action_text(self, action_ids: list[int]) -> str:
        """What the policy wrote, without its end-of-turn token; other special tokens stay visible as text.

        Dropping them would let "4<pad>6" count as 46.
        """
        ids = action_ids[:-1] if action_ids and action_ids[-1] in self.stop_token_ids else action_ids
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def action_ids(self, text: str, next_role: str = "user") -> list[int]:
        """A written-down action as the sampler would have to produce it: for demonstrations only.

        Args:
            text: the action.
            next_role: whose message follows; matters where the next role's marker is what ends a turn.
        """
        return self._encode_plain(text) + [self._markers(next_role).closing[-1]]

    def check_role(self, role: str) -> None:
        """Raise ConfigError now, not in the middle of the first episode, if `role` cannot write observations."""
        self._markers(role)

    def observation_ids(self, action_ids: list[int], observation: str, role: str) -> tuple[list[int], list[int]]:
        """What follows an action in the context.

        Args:
            action_ids: the sampled ids; normally their last one is the end-of-turn token.
            observation: the environment's text.
            role: "tool" or "user".
        Returns:
            (suffix_ids, observation_ids): suffix_ids close a turn that the sampler did not close itself (empty
            otherwise); observation_ids are the role's opening, the text, and the next generation prompt.
        """
        markers = self._markers(role)
        is_closed = bool(action_ids) and action_ids[-1] == markers.closing[-1]
        suffix = [] if is_closed else list(markers.closing)
        return suffix, markers.opening + self._encode_plain(observation) + markers.ending

    @cached_property
    def end_of_turn_id(self) -> int:
        """The special token that the template writes after an assistant's content."""
        return self._markers("user").closing[-1]

    @cached_property
    def stop_token_ids(self) -> list[int]:
        """Ids at which the engine must end an action; the sampled one stays part of the action."""
        ids = {self.tokenizer.eos_token_id} - {None}
        if self.tokenizer.chat_template:
            ids.add(self.end_of_turn_id)
            # Some templates (GLM) have no end-of-turn token: the next role's marker ends the turn, and differs by role.
            try:
                ids.add(self._markers("tool").closing[-1])
            except ConfigError:
                pass  # a template without tool messages; asked for again, with the error, when one is to be written
        return sorted(ids)

    @cached_property
    def _leading_bos(self) -> list[int]:
        """[bos] if this tokenizer puts BOS in front of plain text, else []."""
        bos = self.tokenizer.bos_token_id
        with_special = self.tokenizer.encode("a", add_special_tokens=True)
        return [bos] if bos is not None and with_special[:1] == [bos] else []

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _encode_plain(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def _render(self, messages: list[Message], add_generation_prompt: bool) -> str:
        if not self.tokenizer.chat_template:
            raise ConfigError("the tokenizer of model.path has no chat template; add one, or use an environment that "
                              "starts with plain text and has one turn")
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)

    def _markers(self, role: str) -> _Markers:
        if role not in self._markers_by_role:
            self._markers_by_role[role] = self._derive_markers(role)
        return self._markers_by_role[role]

    def _derive_markers(self, role: str) -> _Markers:
        messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ACTION},
                    {"role": role, "content": _OBSERVATION}]
        try:
            text = self._render(messages, add_generation_prompt=True)
        except ConfigError:
            raise
        except Exception as error:  # whatever a template's own raise_exception or jinja makes of it
            raise ConfigError(f"the chat template of model.path cannot write a {role} message: {error}") from error
        if text.count(_ACTION) != 1 or text.count(_OBSERVATION) != 1:
            raise ConfigError(f"the chat template of model.path does not write the contents of an assistant and a "
                              f"{role} message exactly once; its turns cannot be continued in token ids")
        between, ending = text.split(_ACTION)[1].split(_OBSERVATION)
        between_ids = self._encode(between)
        special = {id for id, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        end = next((i for i, id in enumerate(between_ids) if id in special), None)
        if end is None:
            raise ConfigError("the chat template of model.path writes no special token after an assistant's content, "
                              "so a sampled turn has no end; use a template with an end-of-turn token")
        return _Markers(closing=between_ids[: end + 1], opening=between_ids[end + 1 :], ending=self._encode(ending))
