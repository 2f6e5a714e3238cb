"""A real server of the driver, and messages of training processes over TCP."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from hvdrecover.errors import LaunchError
from hvdrecover_ray.function_server import ERROR, FUNCTION, RESULT, FunctionServer, Message, send


@pytest.fixture
def server() -> Iterator[FunctionServer]:
    started = FunctionServer("127.0.0.1", "secret", b"the function")
    yield started
    started.close()


def send_to(server: FunctionServer, kind: str, start: str = "1", **facts: object) -> bytes:
    return send(server.endpoint, Message(kind, start, 0, "n1", **facts))  # type: ignore[arg-type]


def failure(error: Exception) -> dict[str, object]:
    return {"pickled": pickle.dumps(error), "text": f"Traceback\n{error!r}\n"}


def test_a_process_gets_the_function_and_sends_the_result(server: FunctionServer) -> None:
    assert send_to(server, FUNCTION) == b"the function"
    assert send_to(server, RESULT, pickled=pickle.dumps([1, 2])) == b""
    assert server.result() == [1, 2]
    assert server.error() is None


def test_a_missing_result_is_an_error(server: FunctionServer) -> None:
    with pytest.raises(LaunchError) as caught:
        server.result()
    assert "rank 0" in caught.value.program


def test_a_result_that_cannot_be_pickled_is_an_error(server: FunctionServer) -> None:
    send_to(server, RESULT, text="TypeError: cannot pickle a lock")
    with pytest.raises(LaunchError) as caught:
        server.result()
    assert "rank 0" in caught.value.program
    assert "TypeError: cannot pickle a lock" in caught.value.problem


def test_an_error_is_raised_as_itself_with_its_traceback_as_the_cause(server: FunctionServer) -> None:
    send_to(server, FUNCTION)
    send_to(server, ERROR, **failure(KeyError("x")))
    error = server.error()
    assert isinstance(error, KeyError) and error.args == ("x",)
    assert str(error.__cause__) == "rank 0 on n1: \nTraceback\nKeyError('x')\n"


def test_an_error_goes_before_the_errors_that_follow_from_it(server: FunctionServer) -> None:
    send_to(server, FUNCTION)
    send_to(server, ERROR, **failure(KeyError("first")))
    send_to(server, ERROR, **failure(KeyError("own")))
    send_to(server, ERROR, **failure(ValueError("follows")), follows=True)
    error = server.error()
    assert error is not None and error.args == ("own",)


def test_an_error_before_a_restart_of_the_job_does_not_count(server: FunctionServer) -> None:
    send_to(server, FUNCTION)
    send_to(server, ERROR, **failure(KeyError("x")))
    send_to(server, FUNCTION)  # restarted in place
    assert server.error() is not None
    send_to(server, FUNCTION, start="2")
    send_to(server, ERROR, **failure(KeyError("from before the restart")))
    assert server.error() is None


def test_of_an_error_that_cannot_be_pickled_the_traceback_is_shown(server: FunctionServer) -> None:
    send_to(server, FUNCTION)
    send_to(server, ERROR, text="Traceback\nOdd: 1\n")
    error = server.error()
    assert isinstance(error, LaunchError) and "Odd: 1" in str(error)
