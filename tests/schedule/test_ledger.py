"""Every issued prompt comes out once."""

import random
import sqlite3

import pytest

from megatron_sao.errors import ProtocolError
from megatron_sao.schedule.ledger import Ledger
from tests.schedule.support import make_prompt


@pytest.fixture
def ledger(tmp_path):
    book = Ledger(tmp_path / "ledger.sqlite")
    yield book
    book.close()


def issue(ledger: Ledger, *names: str) -> None:
    for name in names:
        ledger.issue(make_prompt(name))


def test_the_way_of_a_prompt(ledger):
    issue(ledger, "a", "b", "c", "d")
    for name in "abc":
        ledger.finish(name)
    ledger.drop("c", "stale")
    ledger.take(["a", "b"], phase="train", step=3)
    ledger.train(["a", "b"])
    counts = ledger.check()
    assert (counts.issued, counts.trained, counts.dropped, counts.in_flight) == (4, 2, 1, 1)
    assert counts.dropped_by_reason == {"stale": 1}


def test_nothing_is_issued_twice(ledger):
    issue(ledger, "a")
    with pytest.raises(ProtocolError, match="a was issued before"):
        issue(ledger, "a")
    assert ledger.check().issued == 1


@pytest.mark.parametrize(
    "act",
    [
        lambda book: book.finish("buffered"),  # an engine that answers twice
        lambda book: book.finish("trained"),
        lambda book: book.finish("dropped"),
        lambda book: book.finish("unknown"),
        lambda book: book.take(["in_flight"], phase="train", step=1),
        lambda book: book.take(["buffered", "in_flight"], phase="train", step=1),
        lambda book: book.take(["buffered", "buffered"], phase="train", step=1),
        lambda book: book.take(["training"], phase="train", step=1),
        lambda book: book.train(["buffered"]),
        lambda book: book.train(["trained"]),
        lambda book: book.drop("trained", "stale"),
        lambda book: book.drop("dropped", "stale"),
    ],
)
def test_a_wrong_move_is_refused_and_changes_nothing(ledger, act):
    issue(ledger, "in_flight", "buffered", "training", "trained", "dropped")
    for name in ("buffered", "training", "trained"):
        ledger.finish(name)
    ledger.take(["training", "trained"], phase="train", step=0)
    ledger.train(["trained"])
    ledger.drop("dropped", "unscored")
    before = ledger.check()
    with pytest.raises(ProtocolError):
        act(ledger)
    assert ledger.check() == before


def test_it_survives_a_restart(tmp_path):
    path = tmp_path / "ledger.sqlite"
    first = Ledger(path)
    issue(first, *(f"p{i}" for i in range(7)))
    for i in (0, 1, 2, 3, 6):
        first.finish(f"p{i}")
    first.take([f"p{i}" for i in range(4)], phase="train", step=0)
    first.train([f"p{i}" for i in range(4)])
    before = first.check()  # not closed: a killed process does not close either

    second = Ledger(path)
    assert second.check() == before
    assert second.put_back(["p6"]) == [make_prompt("p4"), make_prompt("p5")]
    assert second.check() == before
    with pytest.raises(ProtocolError):
        issue(second, "p4")


def test_a_book_that_was_tampered_with_does_not_balance(tmp_path, ledger):
    issue(ledger, "a", "b")
    with sqlite3.connect(tmp_path / "ledger.sqlite") as other:
        other.execute("DELETE FROM prompts WHERE prompt_id = 'a'")
    with pytest.raises(ProtocolError, match="does not balance"):
        ledger.check()


def test_random_runs_balance(tmp_path):
    for seed in range(20):
        rng = random.Random(seed)
        ledger = Ledger(tmp_path / f"{seed}.sqlite")
        where = {"in_flight": [], "buffered": [], "training": [], "out": []}
        for i in range(150):
            match rng.randrange(5):
                case 0 | 1:
                    issue(ledger, f"p{i}")
                    where["in_flight"].append(f"p{i}")
                case 2 if where["in_flight"]:
                    name = where["in_flight"].pop(rng.randrange(len(where["in_flight"])))
                    ledger.finish(name)
                    where["buffered"].append(name)
                case 3 if where["buffered"]:
                    batch, where["buffered"] = where["buffered"][:3], where["buffered"][3:]
                    ledger.take(batch, phase="train", step=i)
                    ledger.train(batch)
                    where["out"] += batch
                case 4 if where["buffered"]:
                    ledger.drop(name := where["buffered"].pop(), "stale")
                    where["out"].append(name)
        counts = ledger.check()
        assert counts.issued == counts.trained + counts.dropped + counts.in_flight + counts.buffered + counts.training
        assert counts.trained + counts.dropped == len(where["out"])
        ledger.close()
