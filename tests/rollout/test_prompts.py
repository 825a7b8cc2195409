"""Prompt files and prompt sources (INP-01, INP-04, ASY-09 and their kind)."""

import asyncio

import pytest

from megatron_sao.errors import ConfigError, DataError
from megatron_sao.rollout.calculator import Calculator
from megatron_sao.rollout.environment import generated_task, split_of
from megatron_sao.rollout.prompts import PromptSource, read_prompt_file, without_overlong

LINES = [b"", b'{"prompt":"a"}', b"", b'{"prompt":', b"[]", '{"prompt":"\u00e9\u4f60"}'.encode(), b'{"question":"x"}',
         b'{"prompt":""}\r', b'{"prompt":"b"}']


def written(folder, content: bytes):
    path = folder / "prompts.jsonl"
    path.write_bytes(content)
    return path


def test_the_first_bad_line_is_named(tmp_path):  # INP-01
    path = written(tmp_path, b"\n".join(LINES))
    with pytest.raises(DataError, match=r"prompts\.jsonl line 4"):
        read_prompt_file(path)


def test_bad_lines_are_skipped_with_their_reasons(tmp_path):  # INP-01
    got = read_prompt_file(written(tmp_path, b"\n".join(LINES)), on_bad_line="skip")
    assert [task["prompt"] for task in got.tasks] == ["a", "\u00e9\u4f60", "b"]
    assert list(got.skipped) == [4, 5, 7, 8]
    for number, word in {4: "JSON", 5: "list", 7: "question", 8: "empty"}.items():
        assert word in got.skipped[number]


def test_a_byte_order_mark_is_accepted_at_the_start_only(tmp_path):  # INP-01
    mark = b"\xef\xbb\xbf"
    assert read_prompt_file(written(tmp_path, mark + b'{"prompt":"a"}\n')).tasks == [{"prompt": "a"}]
    with pytest.raises(DataError, match="line 2"):
        read_prompt_file(written(tmp_path, b'{"prompt":"a"}\n' + mark + b'{"prompt":"a"}\n'))


@pytest.mark.parametrize("content", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_an_error(tmp_path, content):  # INP-01
    for mode in ("error", "skip"):
        with pytest.raises(DataError, match="no usable prompt"):
            read_prompt_file(written(tmp_path, content), mode)


def test_a_file_of_bad_lines_alone_is_an_error_even_when_skipping(tmp_path):
    with pytest.raises(DataError, match="2 bad lines"):
        read_prompt_file(written(tmp_path, b"[]\n{}\n"), "skip")


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match="nowhere.jsonl"):
        read_prompt_file(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError):
        read_prompt_file(tmp_path)


@pytest.mark.parametrize("row", [
    b"1", b"null", b'"text"', b'{"prompt":1}', b'{"prompt":null}', b'{"prompt":"  "}', b'{"prompt":[]}',
    b'{"prompt":["a"]}', b'{"prompt":[{"role":"user"}]}', b'{"prompt":"a","prompt":"b"}', b'{"prompt":"a","x":NaN}',
    b'{"prompt":"a"} {"prompt":"b"}', b'{"prompt":"a\\ud83d b"}', b'{"prompt":"\xff"}', b"{'prompt':'a'}",
    b'{"prompt":"a","n":' + b"9" * 40 + b"}", b"[" * 100_000,
])
def test_every_kind_of_bad_row_is_named_by_its_line(tmp_path, row):
    with pytest.raises(DataError, match="line 3"):
        read_prompt_file(written(tmp_path, b'{"prompt":"a"}\n\n' + row + b"\n"))


def test_line_numbers_are_physical_whatever_the_text_holds(tmp_path):
    content = '{"prompt":"a\u2028b\x0cc\u0085"}\r\n{"prompt":[{"role":"user","content":"c"}]}\n[]'.encode()
    with pytest.raises(DataError, match="line 3"):
        read_prompt_file(written(tmp_path, content.replace(b"\x0c", b"\\f")))


def fixed_source(names: str, **rest) -> PromptSource:
    """All of `names` that hash to the training side, in order."""
    return PromptSource("train", "calculator", Calculator(), seed=1, tasks=[{"prompt": n} for n in names], **rest)


def train_names(number: int) -> str:
    return "".join(c for c in map(chr, range(97, 600)) if split_of({"prompt": c}) == "train")[:number]


def texts(prompts) -> str:
    return "".join(p.task["prompt"] for p in prompts)


def test_epochs_wrap_as_often_as_needed():  # ASY-09
    a, b, c = names = train_names(3)
    source = fixed_source(names, shuffle=False)
    assert texts(source.take(8)) == a + b + c + a + b + c + a + b
    assert (source.epoch, source.offset) == (2, 2)
    source = fixed_source(names, shuffle=False)
    assert texts(source.take(3)) == names
    assert (source.epoch, source.offset) == (1, 0)
    assert texts(source.take(1)) == a
    assert texts(source.take(100)) == (b + c + a) * 33 + b
    assert source.take(0) == []


def test_no_prompts_are_an_error():  # ASY-09
    with pytest.raises(DataError, match="none of the 0 prompts"):
        fixed_source("")
    only_eval = next(c for c in map(chr, range(97, 600)) if split_of({"prompt": c}) == "eval")
    with pytest.raises(DataError, match="train split"):
        fixed_source(only_eval)


def test_ids_are_unique_and_give_the_prompt_back():
    source = fixed_source(train_names(5))
    issued = source.take(17)
    assert len({p.prompt_id for p in issued}) == 17
    assert all(source.prompt_of(p.prompt_id) == p for p in issued)
    for wrong in ("eval/e0/1", "train/e0/5", "train/e0/x", "train/0/1", "nonsense", "train/e0/-1"):
        with pytest.raises(DataError, match="no prompt of the train split"):
            source.prompt_of(wrong)


def test_the_order_depends_on_the_seed_and_the_epoch_alone():
    names = train_names(20)
    first = texts(fixed_source(names).take(60))
    assert first == texts(fixed_source(names).take(60))
    epochs = [first[:20], first[20:40], first[40:]]
    assert all(sorted(e) == sorted(names) for e in epochs) and len(set(epochs)) == 3


def test_a_restored_source_goes_on_where_it_stopped():
    whole = fixed_source(train_names(7)).take(30)
    source = fixed_source(train_names(7))
    source.take(11)
    other = fixed_source(train_names(7))
    other.restore(source.state())
    assert other.take(19) == whole[11:]
    state, changed = source.state(), train_names(8)[1:]
    others = [fixed_source(train_names(6)), fixed_source(changed), fixed_source(train_names(7), rollouts_per_prompt=2)]
    others += [PromptSource("train", "calculator", Calculator(max_digits=n), seed=1) for n in (2, 3)]
    for one in others:
        with pytest.raises(DataError, match="saved position"):
            one.restore(state)
    with pytest.raises(DataError, match="saved position"):
        others[-1].restore(others[-2].state())


def test_groups_repeat_a_prompt_in_a_row():
    source = fixed_source(train_names(3), shuffle=False, rollouts_per_prompt=2)
    issued = source.take(6)
    assert [p.prompt_id for p in issued[:4]] == ["train/e0/0#0", "train/e0/0#1", "train/e0/1#0", "train/e0/1#1"]
    assert (source.epoch, source.offset) == (1, 0)
    assert source.prompt_of("train/e0/1#1") == issued[3]


def test_generated_splits_never_share_a_prompt():
    environment = Calculator(max_digits=2)
    train = PromptSource("train", "calculator", environment, seed=1).take(600)
    evaluation = PromptSource("eval", "calculator", environment, seed=1, num_prompts=300).all()
    asked = {p.task["prompt"] for p in train}
    assert len(asked) > 300
    assert not asked & {p.task["prompt"] for p in evaluation}
    other_seed = PromptSource("train", "calculator", environment, seed=2).take(600)
    assert not {p.task["prompt"] for p in other_seed} & {p.task["prompt"] for p in evaluation}
    assert [p.task for p in other_seed] != [p.task for p in train]


def test_a_split_that_no_task_belongs_to_is_an_error():
    class OneTask(Calculator):
        def draw(self, rng):
            return {"prompt": "1+1=", "answer": "2"}

    missing = "eval" if split_of({"prompt": "1+1="}) == "train" else "train"
    with pytest.raises(ConfigError, match=f"{missing} split"):
        generated_task(OneTask(), missing, 0, 1)


def test_an_endless_source_cannot_be_listed():
    with pytest.raises(DataError, match="endless"):
        PromptSource("eval", "calculator", Calculator(), seed=1).all()


def test_overlong_prompts_are_left_out_and_counted(chat):  # INP-04
    tasks = [{"prompt": "1" * n, "answer": "1"} for n in (1, 5, 6, 7)]
    # <user>, <end> and <assistant> are tokens too
    kept, num_left_out = asyncio.run(without_overlong(tasks, Calculator(), chat, 8))
    assert [len(t["prompt"]) for t in kept] == [1, 5] and num_left_out == 2
    with pytest.raises(DataError, match="all 4 prompts"):
        asyncio.run(without_overlong(tasks, Calculator(), chat, 3))
