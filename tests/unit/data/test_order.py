import collections
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdrecover.data.order import SampleOrder, permutation
from hvdrecover.errors import ConfigError, MismatchError


@pytest.mark.parametrize(
    ("length", "seed", "epoch", "order"),
    [
        (10, 0, 0, [6, 1, 0, 5, 3, 8, 7, 9, 2, 4]),
        (10, 0, 1, [7, 3, 5, 0, 1, 4, 6, 8, 9, 2]),
        (10, 1, 0, [1, 0, 9, 8, 6, 3, 7, 4, 2, 5]),
        (7, 2**64 - 1, 3, [4, 6, 5, 3, 1, 2, 0]),
        (7, -1, 3, [4, 6, 5, 3, 1, 2, 0]),
        (5, 2**40, 2, [0, 1, 3, 4, 2]),
        (1, 0, 0, [0]),
        (0, 0, 0, []),
    ],
)
def test_the_order_never_changes(length, seed, epoch, order):
    # A commit's cursor counts in it: another order would make resumed runs see samples twice or never.
    assert permutation(length, seed, epoch).tolist() == order


@pytest.mark.parametrize(("tail", "done"), [("pad", 5), ("drop", 4), ("drop", 5)])
def test_a_restored_cursor_at_the_end_yields_nothing_once(tail, done):
    order = SampleOrder(5, shuffle=False, tail=tail)
    order.place(0, 2)
    order.load_state_dict({"epoch": 2, "processed_num": done})
    assert order.begin().tolist() == []
    assert len(order.begin()) == (3 if tail == "pad" else 2)


def test_a_step_has_the_samples_of_all_batches_since_the_step_before():
    order = SampleOrder(20, shuffle=False)
    order.place(1, 2)
    order.begin()
    for stepped in (False, True, False):
        order.stepped = stepped
        order.record(2)
    assert order.present() == [13, 15]
    assert order.present(whole_step=True) == [9, 11, 13, 15]


@pytest.mark.parametrize("names", [(2,), (0, 1, 2), (2, 0, 1)])
def test_a_resumed_epoch_continues_if_it_is_the_highest_that_is_named(names):
    before = SampleOrder(10)
    before.set_epoch(2)
    before.record(4)
    order = SampleOrder(10)
    order.load_state_dict(before.state_dict())
    for name in names:
        order.set_epoch(name)
    assert (order.epoch, order.begin().tolist()) == (2, permutation(10, 0, 2)[4:].tolist())


def test_a_finished_epoch_is_not_gone_back_from_but_a_second_phase_begins(caplog):
    order = SampleOrder(6)
    for epoch in (0, 1, 0, 1):
        order.set_epoch(epoch)
        assert order.begin().tolist() == permutation(6, 0, epoch).tolist()
        order.record(6)
    assert caplog.messages == []


def test_an_epoch_that_is_gone_back_from_is_told_once(caplog):
    order = SampleOrder(6)
    order.set_epoch(3)
    order.begin()
    order.record(2)
    for _ in range(2):
        order.set_epoch(0)
        assert len(order.begin()) == 6
        order.set_epoch(3)
        order.begin()
        order.record(2)
    (line,) = caplog.messages
    assert "set_epoch(0) goes back from epoch 3" in line
    assert "2 of 6 samples" in line


def test_a_script_without_set_epoch_is_told_when_an_epoch_comes_again_and_when_one_is_empty(caplog):
    order = SampleOrder(6)
    for _ in range(3):
        assert len(order.begin()) == 6
        order.record(6)
    (line,) = caplog.messages
    assert "epoch 0 is repeated" in line and "set_epoch(state.epoch)" in line
    caplog.clear()
    resumed = SampleOrder(6)
    resumed.load_state_dict(order.state_dict())
    assert len(resumed.begin()) == 0
    (line,) = caplog.messages
    assert "this pass over epoch 0 is empty" in line and "set_epoch(state.epoch)" in line


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"length": 11}, "length 11, .* 10"),
        ({"seed": 1}, "seed 1, .* 0"),
        ({"shuffle": False}, "shuffle False, .* True"),
        ({"processed_num": -1}, "'processed_num': -1"),
        ({"processed_num": "4"}, "'processed_num': '4'"),
        ({"epoch": None}, "'epoch': None"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(changes, facts):
    order = SampleOrder(10)
    order.record(3)
    with pytest.raises(MismatchError) as caught:
        order.load_state_dict({**order.state_dict(), "epoch": 4, "processed_num": 5, **changes}, "train")
    (line,) = caught.value.differences
    assert re.match(f"train: .*{facts}", line)
    assert (order.epoch, order.done) == (0, 3)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("tail", lambda: SampleOrder(1, tail="wrap")),
        ("seed", lambda: SampleOrder(1, seed=1.5)),
        ("epoch", lambda: SampleOrder(1).set_epoch(-1)),
        ("epoch", lambda: SampleOrder(1).set_epoch(1.5)),
        ("batch_size", lambda: SampleOrder(1).record(-1)),
    ],
)
def test_what_cannot_be_is_a_config_error_that_names_it(name, make):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.name == name


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_a_bad_step_had_the_batches_since_the_step_before_it(batches):
    order = SampleOrder(60, shuffle=False)
    order.begin()
    for _ in range(2):  # each step comes before its last batch is recorded
        for _ in range(batches - 1):
            order.record(4)
        order.stepped = True
        order.record(4)
    for _ in range(batches - 1):
        order.record(4)
    assert order.stretch(order.unstepped, 4)[2:] == (8 * batches, 12 * batches)


KINDS = ("place", "begin", "step", "end", "bad", "epoch", "commit", "fault")
operations = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 6)), max_size=40)


@settings(max_examples=100)
@given(st.integers(0, 40), st.booleans(), st.sampled_from(["pad", "drop"]), operations)
def test_every_state_loads_again_and_each_sample_is_seen_once_or_left_out(length, shuffle, tail, operations):
    def made(cursor, size):
        orders = [SampleOrder(length, shuffle=shuffle, seed=1, tail=tail) for _ in range(size)]
        for rank, order in enumerate(orders):
            order.load_state_dict(json.loads(json.dumps(cursor)))
            order.place(rank, size)
        return orders

    def finish(orders, seen):
        """Deal out what is left, and check the pass."""
        order = orders[0]
        shares = [each.share_of(rank).tolist() for rank, each in enumerate(orders)]
        dealt = [sample for round_ in zip(*shares, strict=True) for sample in round_]
        fresh = dealt[: order.left]
        counted = collections.Counter([*seen, *fresh])
        out = {int(order._order()[place]) for gap in order.gaps for place in range(*gap)}
        assert max(counted.values(), default=1) == 1
        assert out.isdisjoint(counted)
        missed = length - len(counted) - len(out)
        assert missed == 0 if tail == "pad" else missed < len(orders)
        assert len(dealt) - len(fresh) < len(orders)

    orders = made(SampleOrder(length, shuffle=shuffle, seed=1).state_dict(), 1)
    seen, committed = [], (orders[0].state_dict(), [])
    for operation, number in operations:
        order = orders[0]
        size, place = max(1, number), (order.epoch, order.passes)
        if operation == "place":
            orders = made(order.state_dict(), size)
        elif operation == "step":
            seen += order.remaining().tolist()[: number * order.size]
            for each in orders:
                each.record(number)
        elif operation == "commit":
            committed = (order.state_dict(), list(seen))
        elif operation in ("bad", "fault"):
            stretch = order.stretch(order.done, number)
            orders = made(committed[0], len(orders) if operation == "bad" else size)
            seen, place = list(committed[1]), (orders[0].epoch, orders[0].passes)
            if operation == "bad":
                for each in orders:
                    each.leave_out(stretch)
                committed = (orders[0].state_dict(), list(seen))
        else:
            for each in orders:
                if operation == "epoch":
                    each.set_epoch(number)
                else:
                    (each.begin if operation == "begin" else each.end)()
        if (orders[0].epoch, orders[0].passes) != place:
            seen = []
        states = [each.state_dict() for each in orders]
        assert states == [states[0]] * len(states)
        assert order.misfits(json.loads(json.dumps(states[0])), "") == []
        finish(orders, seen)
