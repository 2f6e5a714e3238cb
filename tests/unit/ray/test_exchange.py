"""A real exchange, and messages of training processes over TCP."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from hvdrecover.errors import LaunchError
from hvdrecover.ray.exchange import ERROR, FUNCTION, RESULT, Exchange, Message, send

KEY = b"secret"


@pytest.fixture
def exchange() -> Iterator[Exchange]:
    started = Exchange("127.0.0.1", KEY, b"the function")
    yield started
    started.close()


def hand_in(exchange: Exchange, kind: str, start: str = "1", **facts: object) -> bytes:
    port = int(exchange.place.partition("/")[2].partition(":")[0])
    return send("127.0.0.1", port, KEY, Message(kind, start, 0, "n1", **facts))  # type: ignore[arg-type]


def failure(error: Exception) -> dict[str, object]:
    return {"pickled": pickle.dumps(error), "text": f"Traceback\n{error!r}\n"}


def test_a_process_gets_the_function_and_brings_the_result(exchange: Exchange) -> None:
    assert hand_in(exchange, FUNCTION) == b"the function"
    assert hand_in(exchange, RESULT, pickled=pickle.dumps([1, 2])) == b""
    assert exchange.result() == [1, 2]
    assert exchange.error() is None


def test_a_result_that_did_not_come_is_an_error(exchange: Exchange) -> None:
    with pytest.raises(LaunchError) as caught:
        exchange.result()
    assert "rank 0" in caught.value.program


def test_a_result_that_can_not_be_pickled_is_an_error(exchange: Exchange) -> None:
    hand_in(exchange, RESULT, text="TypeError: cannot pickle a lock")
    with pytest.raises(LaunchError) as caught:
        exchange.result()
    assert "rank 0" in caught.value.program
    assert "TypeError: cannot pickle a lock" in caught.value.problem


def test_an_error_is_raised_as_itself_with_its_traceback_as_the_cause(exchange: Exchange) -> None:
    hand_in(exchange, FUNCTION)
    hand_in(exchange, ERROR, **failure(KeyError("x")))
    error = exchange.error()
    assert isinstance(error, KeyError) and error.args == ("x",)
    assert str(error.__cause__) == "rank 0 on n1: \nTraceback\nKeyError('x')\n"


def test_an_error_of_ones_own_goes_before_one_that_it_has_led_to(exchange: Exchange) -> None:
    hand_in(exchange, FUNCTION)
    hand_in(exchange, ERROR, **failure(KeyError("first")))
    hand_in(exchange, ERROR, **failure(KeyError("own")))
    hand_in(exchange, ERROR, **failure(ValueError("heard")), hearsay=True)
    error = exchange.error()
    assert error is not None and error.args == ("own",)


def test_an_error_that_a_new_start_has_repaired_does_not_count(exchange: Exchange) -> None:
    hand_in(exchange, FUNCTION)
    hand_in(exchange, ERROR, **failure(KeyError("x")))
    hand_in(exchange, FUNCTION)  # restarted in place
    assert exchange.error() is not None
    hand_in(exchange, FUNCTION, start="2")
    hand_in(exchange, ERROR, **failure(KeyError("of a process of the start before")))
    assert exchange.error() is None


def test_an_error_that_can_not_be_handed_over_is_told_in_words(exchange: Exchange) -> None:
    hand_in(exchange, FUNCTION)
    hand_in(exchange, ERROR, text="Traceback\nOdd: 1\n")
    error = exchange.error()
    assert isinstance(error, LaunchError) and "Odd: 1" in str(error)
