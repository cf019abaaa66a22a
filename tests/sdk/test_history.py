"""The append-only tree with an active path (SPEC §4)."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caddie_sdk.errors import SessionError
from caddie_sdk.history import History, Node
from caddie_sdk.messages import Message


def message(text: str) -> Message:
    return {"role": "user", "content": text}


def grow(history: History, *texts: str) -> list[Node]:
    return [history.append(message(text), "task", step) for step, text in enumerate(texts)]


def texts(history: History) -> list[Any]:
    return [m["content"] for m in history.messages()]


def test_a_list_is_the_special_case() -> None:
    history = History()
    assert (history.head, history.messages(), history.archived) == (None, [], ())
    first, second = grow(history, "a", "b")
    assert texts(history) == ["a", "b"]
    assert history.head is second
    assert second.parent is first
    assert first.parent is None
    assert (first.id, second.id, second.step, second.kind) == (0, 1, 1, "task")


def test_a_fork_shares_the_prefix_and_grows_on_its_own() -> None:
    history = History()
    grow(history, "a", "b")
    child = history.fork()
    grow(history, "parent")
    grow(child, "child", "more")
    assert texts(history) == ["a", "b", "parent"]
    assert texts(child) == ["a", "b", "child", "more"]
    assert child.path()[1] is history.path()[1], "the nodes themselves, not copies"
    assert child.path()[2].id == history.path()[2].id == 2, "numbers go on from where the fork was"


def test_a_fork_costs_the_same_however_long_the_history() -> None:
    def cost(length: int) -> float:
        history = History()
        grow(history, *map(str, range(length)))
        best = 1.0
        for _ in range(5):
            started = time.process_time()
            for _ in range(200):
                history.fork()
            best = min(best, time.process_time() - started)
        return best

    assert cost(20_000) < 10 * cost(20)


def test_backtracking_archives_the_suffix_and_keeps_it_in_the_tree() -> None:
    history = History()
    nodes = grow(history, "a", "b", "c", "d")
    assert history.backtrack(nodes[1].id) is nodes[1]
    assert texts(history) == ["a", "b"]
    assert history.archived == (nodes[3],)
    assert nodes[3].parent is nodes[2], "the suffix is whole"
    update = history.append(message("update"), "notice", 2)
    assert texts(history) == ["a", "b", "update"]
    assert update.id == 4, "a number is never used again"
    assert update.parent is nodes[1]
    history.backtrack(nodes[0].id)
    assert history.archived == (nodes[3], update)


def test_backtracking_to_where_one_stands_changes_nothing() -> None:
    history = History()
    nodes = grow(history, "a", "b")
    history.backtrack(nodes[1].id)
    assert texts(history) == ["a", "b"]
    assert history.archived == ()


def test_backtracking_is_possible_only_along_the_active_path() -> None:
    history = History()
    nodes = grow(history, "a", "b")
    history.backtrack(nodes[0].id)
    for gone in (nodes[1].id, 99, -1):
        with pytest.raises(SessionError, match=f"node {gone}"):
            history.backtrack(gone)
    with pytest.raises(SessionError):
        History().backtrack(0)


def test_a_backtracking_child_leaves_its_parent_alone() -> None:
    history = History()
    nodes = grow(history, "a", "b", "c")
    child = history.fork()
    child.backtrack(nodes[0].id)
    grow(child, "x")
    assert texts(history) == ["a", "b", "c"]
    assert history.archived == ()
    assert texts(child) == ["a", "x"]


def test_a_path_taken_before_does_not_lose_what_it_had() -> None:
    """Commands build their messages late, from the path as it was; growing and backtracking must not touch that."""
    history = History()
    nodes = grow(history, "a", "b", "c")
    path = history.path()
    history.backtrack(nodes[0].id)
    grow(history, "x")
    assert [node.message["content"] for node in path[:3]] == ["a", "b", "c"]


def test_dump_and_load_of_a_tree() -> None:
    history = History()
    nodes = grow(history, "a", "b", "c")
    history.backtrack(nodes[0].id)
    history.append(message("x"), "advice", 3, {"consultation": 1})
    data = json.loads(json.dumps(history.dump()))
    again = History.load(data)
    assert again.dump() == history.dump() == data
    assert texts(again) == ["a", "x"]
    assert again.head is not None
    assert (again.head.kind, again.head.step, again.head.meta) == ("advice", 3, {"consultation": 1})
    assert [node.id for node in again.archived] == [2]
    tip = again.archived[0]
    assert tip.parent is not None
    assert tip.parent.message["content"] == "b"
    assert tip.parent.parent is again.path()[0], "branches share their trunk after loading too"
    assert again.append(message("y"), "task", 4).id == 4


def test_a_bad_dump_is_refused() -> None:
    history = History()
    grow(history, "a", "b")
    good = history.dump()
    orphan = {**good, "nodes": good["nodes"][1:]}
    bad: list[Any] = [{}, None, 5, [], {**good, "head": 7}, {**good, "archived": [7]}, {**good, "nodes": [5]}, orphan]
    bad += [{key: value for key, value in good.items() if key != gone} for gone in good]
    for data in bad:
        with pytest.raises(SessionError):
            History.load(data)


@given(st.lists(st.one_of(st.just("append"), st.just("fork"), st.integers(0, 30)), max_size=40))
@settings(max_examples=150, deadline=None)
def test_a_tree_behaves_like_lists_that_are_copied(actions: list[Any]) -> None:
    """Against the obvious model: every history is a list, a fork copies it, backtracking cuts it."""
    histories: list[tuple[History, list[str]]] = [(History(), [])]
    for number, action in enumerate(actions):
        history, model = histories[number % len(histories)]
        if action == "append":
            history.append(message(str(number)), "task", number)
            model.append(str(number))
        elif action == "fork":
            histories.append((history.fork(), list(model)))
        elif model:
            keep = action % len(model)
            history.backtrack(history.path()[keep].id)
            del model[keep + 1 :]
        for each, expected in histories:
            assert texts(each) == expected
            assert texts(History.load(json.loads(json.dumps(each.dump())))) == expected
