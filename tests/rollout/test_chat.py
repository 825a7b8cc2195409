"""Conversations in token ids (TOK-01, TOK-03, TOK-04 and their kind)."""

import pytest

from megatron_sao.errors import ConfigError, DataError
from megatron_sao.rollout.chat import Chat

QUESTION = [{"role": "user", "content": "1+1="}]


def test_sampled_ids_are_never_encoded_again(merging_chat):  # TOK-01
    sampled = [1, 2]
    assert merging_chat.tokenizer.encode(merging_chat.action_text(sampled), add_special_tokens=False) == [3]
    suffix, observation = merging_chat.observation_ids([*sampled, 13], "ok", "tool")
    assert suffix == []
    assert observation[:2] == [11, 12]
    assert [10, *sampled, 13, *observation] == [10, 1, 2, 13, 11, 12, 13, 14]


@pytest.mark.parametrize("kind", ["chat", "qwen_chat"])
def test_continued_ids_equal_the_template_of_the_whole_conversation(kind, request):
    chat = request.getfixturevalue(kind)
    whole = [*QUESTION, {"role": "assistant", "content": "[1+1]"}, {"role": "tool", "content": "2"},
             {"role": "assistant", "content": "2"}, {"role": "user", "content": "sure?"}]
    action_1, action_2 = chat.action_ids("[1+1]"), chat.action_ids("2")
    ids = chat.prompt_ids(QUESTION) + action_1
    ids += sum(chat.observation_ids(action_1, "2", "tool"), [])
    ids += action_2 + sum(chat.observation_ids(action_2, "sure?", "user"), [])
    assert ids == chat.prompt_ids(whole)


def test_a_turn_that_the_next_role_marker_ends(glm_chat):
    token = glm_chat.tokenizer.convert_tokens_to_ids
    observation, user = token("<|observation|>"), token("<|user|>")
    assert set(glm_chat.stop_token_ids) == {observation, user, token("<|endoftext|>")}
    suffix, ids = glm_chat.observation_ids([*glm_chat.action_ids("[1+1]")[:-1], observation], "2", "tool")
    assert suffix == []
    assert glm_chat.tokenizer.decode(ids) == "2<|assistant|>"
    # The policy expected the user, the tool answers: its marker is added, but it was not sampled.
    suffix, ids = glm_chat.observation_ids([*glm_chat.action_ids("[1+1]")[:-1], user], "2", "tool")
    assert suffix == [observation]


def test_a_turn_that_the_sampler_left_open_is_closed_with_unsampled_ids(qwen_chat):  # TOK-04
    end = qwen_chat.end_of_turn_id
    suffix, observation = qwen_chat.observation_ids(qwen_chat.action_ids("7")[:-1], "2", "tool")
    assert suffix == [end]
    assert observation == qwen_chat.observation_ids(qwen_chat.action_ids("7"), "2", "tool")[1]


def test_bos_stands_once(bos_tokenizer):  # TOK-03
    chat = Chat(bos_tokenizer)
    assert bos_tokenizer.encode("<s>a b") == [1, 1, 7, 8]  # the trap
    assert chat.prompt_ids([{"role": "user", "content": "a b"}]) == [1, 7, 8]
    assert chat.prompt_ids("a b") == [1, 7, 8]
    assert chat.prompt_ids("<s>a b") == [1, 7, 8]


def test_a_tokenizer_without_bos_adds_none(chat):  # TOK-03
    a, b = chat.tokenizer.convert_tokens_to_ids(["a", "b"])
    assert chat.prompt_ids("ab") == [a, b]


def test_a_bos_that_the_tokenizer_itself_does_not_add_is_not_added(bos_tokenizer):
    from tokenizers import processors

    bos_tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    assert Chat(bos_tokenizer).prompt_ids("a b") == [7, 8]


def test_special_text_in_an_observation_stays_text(chat):
    _, ids = chat.observation_ids(chat.action_ids("x"), "4<end>6", "tool")
    assert ids.count(chat.end_of_turn_id) == 1  # the template's own
    assert chat.tokenizer.decode(ids) == "<tool>4<end>6<end><assistant>"


def test_special_tokens_inside_an_action_stay_visible(chat):
    four, six, pad = chat.tokenizer.convert_tokens_to_ids(["4", "6", "<pad>"])
    assert chat.action_text([four, pad, six, chat.end_of_turn_id]) == "4<pad>6"
    assert chat.action_text([four, six, chat.end_of_turn_id]) == "46"
    assert chat.action_text([four, six]) == "46"
    assert chat.action_text([]) == ""


def test_an_empty_prompt_is_refused(chat):
    for start in ("", []):
        with pytest.raises(DataError, match="empty"):
            chat.prompt_ids(start)


def test_a_template_that_cannot_be_continued_is_refused(chat):
    chat.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    with pytest.raises(ConfigError, match="no special token"):
        chat.observation_ids([1], "2", "tool")
    chat.tokenizer.chat_template = "{% for m in messages %}<user>{{ m.content }}{{ m.content }}<end>{% endfor %}"
    with pytest.raises(ConfigError, match="exactly once"):
        Chat(chat.tokenizer).observation_ids([1], "2", "tool")
    chat.tokenizer.chat_template = "{{ raise_exception('no tools here') }}"
    with pytest.raises(ConfigError, match="tool message.*no tools here"):
        Chat(chat.tokenizer).check_role("tool")
    chat.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        Chat(chat.tokenizer).prompt_ids(QUESTION)
