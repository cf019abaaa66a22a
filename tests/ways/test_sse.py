"""Server-sent events: any cut of the bytes gives the same events."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caddie_sdk.relay.sse import EventReader, ServerEvent, event


def read(*parts: bytes) -> list[ServerEvent]:
    reader = EventReader()
    return [*(one for part in parts for one in reader.feed(part)), *reader.close()]


STREAM = (
    b'\xef\xbb\xbfdata: {"a": "Z\xc3\xbcrich \xf0\x9f\x8f\x94"}\r\n\r\n'
    b": a comment\n\nevent: error\ndata:no blank\rdata: two lines\r\rid: 7\nretry: 5\n\ndata: [DONE]\r\n"
)
EVENTS = [ServerEvent('{"a": "Zürich 🏔"}'), ServerEvent("no blank\ntwo lines", "error"), ServerEvent("[DONE]")]


def test_lines_end_in_any_way() -> None:
    assert read(STREAM) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    assert read(*(STREAM[one:two] for one, two in itertools.pairwise(edges))) == EVENTS


def test_byte_by_byte() -> None:
    assert read(*(bytes([one]) for one in STREAM)) == EVENTS


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_an_event_is_given_as_soon_as_its_blank_line_is_there(end: str) -> None:
    reader = EventReader()
    assert [one.data for one in reader.feed(f"data: 1{end}{end}".encode())] == ["1"]
    assert [one.data for one in reader.feed(f"data: 2{end}{end}".encode())] == ["2"]
    assert list(reader.close()) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=60)
@given(st.lists(st.tuples(JSON, st.sampled_from(["", "error"]))), st.integers(1, 40))
def test_what_is_written_is_read_back(said: list[tuple[object, str]], size: int) -> None:
    stream = b"".join(event({"it": value}, name) for value, name in said)
    found = read(*(stream[at : at + size] for at in range(0, len(stream), size)))
    assert [(one.json()["it"], one.name) for one in found] == said


def test_a_text_of_several_lines_stays_one_event() -> None:
    assert read(event("one\ntwo", "error")) == [ServerEvent("one\ntwo", "error")]


@pytest.mark.parametrize("data", ["no json", "{", '{"a":' * 100_000])
def test_what_is_no_json_is_none(data: str) -> None:
    assert ServerEvent(data).json() is None


def test_a_long_line_in_small_pieces_takes_linear_time() -> None:
    text = json.dumps("x" * 2_000_000)
    stream = event(text)
    found = read(*(stream[at : at + 500] for at in range(0, len(stream), 500)))
    assert found[0].data == text
