"""What a checkpoint says about itself, on disk and over the network."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caddie_critics import checkpoint
from caddie_critics.checkpoint import (
    find_pack,
    pack_from_checkpoint,
    parse_served_id,
    read_caddie_json,
    served_id,
    verify_pack,
    write_caddie_json,
)
from caddie_critics.packs import Pack, list_packs, load_pack
from caddie_sdk.errors import PackError, PackMismatch
from caddie_sdk.render import RENDERER_VERSION, CriticPrompt

SEARCH = load_pack("search")
words = st.text(min_size=1).filter(lambda text: bool(text.strip()))
names = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True)
limits = st.none() | st.integers(1, 10**6)
packs = st.builds(
    Pack,
    prompt=st.builds(
        CriticPrompt,
        name=names,
        system=words,
        cue=words,
        feedback=st.sampled_from(["sections", "feedback"]),
        task_tag=st.sampled_from(["task", "query"]),
        show_system=st.booleans(),
        show_tools=st.booleans(),
        max_tokens=limits,
        max_input_tokens=limits,
    ),
    version=st.text(),
    description=st.text(),
    action_formats=st.lists(st.text()).map(tuple),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


# ------------------------------------------------------------------ caddie.json


@given(
    pack=packs,
    base=st.none() | st.text(),
    trained=st.dictionaries(st.from_regex(r"x_[a-z]{1,8}", fullmatch=True), json_values),
)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, pack: Pack, base: str | None, trained: dict[str, Any]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = write_caddie_json(folder, pack, base_model=base, **trained)
    assert path == folder / "caddie.json"
    facts = read_caddie_json(folder)
    assert facts is not None
    assert facts == json.loads(path.read_text()) == read_caddie_json(path)
    assert (facts["format"], facts["pack_hash"]) == (1, pack.hash)
    assert (facts["base_model"], facts["trained_with"]) == (base, trained)
    assert replace(pack_from_checkpoint(facts), origin="") == pack
    assert verify_pack(facts, pack) is None


def test_a_gguf_file_has_its_own_facts_or_those_of_its_folder(tmp_path: Path) -> None:
    gguf = tmp_path / "critic-q4.gguf"
    gguf.write_bytes(b"GGUF")
    assert read_caddie_json(gguf) is None
    write_caddie_json(tmp_path, SEARCH)
    assert (read_caddie_json(gguf) or {})["pack"]["name"] == "search"
    assert write_caddie_json(gguf, load_pack("support")) == tmp_path / "critic-q4.caddie.json"
    assert (read_caddie_json(gguf) or {})["pack"]["name"] == "support"
    assert (read_caddie_json(tmp_path) or {})["pack"]["name"] == "search"


def test_no_facts_are_none(tmp_path: Path) -> None:
    assert read_caddie_json(tmp_path) is None
    assert read_caddie_json(tmp_path / "nowhere") is None


def test_a_write_that_is_interrupted_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_caddie_json(tmp_path, SEARCH, steps=1)

    def killed(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_caddie_json(tmp_path, SEARCH, steps=2)
    assert (read_caddie_json(tmp_path) or {})["trained_with"] == {"steps": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["caddie.json"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    large = Pack(replace(SEARCH.prompt, system="word " * 50_000), "1")
    write_caddie_json(tmp_path, large)
    writer = threading.Thread(target=lambda: [write_caddie_json(tmp_path, large, number=n) for n in range(60)])
    writer.start()
    reads = 0
    while writer.is_alive() or not reads:
        assert (read_caddie_json(tmp_path) or {})["pack_hash"] == large.hash
        reads += 1
    writer.join()


def test_facts_that_are_no_json_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for bad in (object(), float("nan")):
        with pytest.raises(PackError, match="is not JSON"):
            write_caddie_json(tmp_path, SEARCH, learning_rate=bad)
    with pytest.raises(PackError, match=r"field 'pack\.name'"):
        write_caddie_json(tmp_path, Pack(replace(SEARCH.prompt, name="My Pack"), "1"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(PackError, match="cannot be written"):
        write_caddie_json(tmp_path / "nowhere", SEARCH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "field 'format'"),
        ({"pack_hash": "short"}, "field 'pack_hash'"),
        ({"renderer_version": "1"}, "field 'renderer_version'"),
        ({"extra": 1}, "field 'extra': there is no such field"),
        ({"pack": {}}, "field 'pack.name'"),
        ({"pack": None}, "field 'pack'"),
        ({"pack": {**checkpoint._dump_pack(SEARCH), "system": " "}}, "field 'pack.system'"),
        ({"pack": {**checkpoint._dump_pack(SEARCH), "task_tag": "goal"}}, "field 'pack.task_tag'"),
        ({"pack": {**checkpoint._dump_pack(SEARCH), "future": 1}}, "field 'pack.future': there is no such field"),
    ],
)
def test_broken_facts_name_file_and_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_caddie_json(tmp_path, SEARCH)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(PackError, match=message) as caught:
        read_caddie_json(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_facts_at_all_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "caddie.json").write_bytes(content)
    with pytest.raises(PackError, match=r"caddie\.json"):
        read_caddie_json(tmp_path)


# ------------------------------------------------------------------ verification


def facts_of(pack: Pack, tmp_path: Path, **change: Any) -> dict[str, Any]:
    write_caddie_json(tmp_path, pack)
    return {**(read_caddie_json(tmp_path) or {}), **change}


def test_a_mismatch_names_hashes_fields_and_the_way_around(tmp_path: Path) -> None:
    other = Pack(replace(SEARCH.prompt, cue="Advise.", show_tools=True, max_tokens=9), "1")
    facts = facts_of(SEARCH, tmp_path)
    with pytest.raises(PackMismatch) as caught:
        verify_pack(facts, other)
    message = str(caught.value)
    for part in (
        SEARCH.hash,
        other.hash,
        "different fields: cue, show_tools",
        "renderer version 1",
        "--allow-mismatch",
    ):
        assert part in message
    assert "max_tokens" not in message
    assert verify_pack(facts, other, allow_mismatch=True) == message


def test_another_renderer_is_a_mismatch_though_no_field_differs(tmp_path: Path) -> None:
    facts = facts_of(SEARCH, tmp_path, renderer_version=RENDERER_VERSION + 1, pack_hash="0" * 16)
    with pytest.raises(PackMismatch, match=f"renderer version {RENDERER_VERSION + 1} then, {RENDERER_VERSION} now"):
        verify_pack(facts, pack_from_checkpoint(facts))


def test_an_edited_file_is_told_apart(tmp_path: Path) -> None:
    facts = facts_of(SEARCH, tmp_path, pack_hash="0" * 16)
    with pytest.raises(PackMismatch, match="edited by hand"):
        verify_pack(facts, SEARCH)


def test_other_limits_are_no_mismatch(tmp_path: Path) -> None:
    facts = facts_of(SEARCH, tmp_path)
    assert verify_pack(facts, Pack(replace(SEARCH.prompt, max_tokens=9, max_input_tokens=9), "2")) is None


# ------------------------------------------------------------------ finding a pack


def test_a_pack_is_found_by_name_by_folder_and_in_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Pack(replace(SEARCH.prompt, name="mine"), "1")
    gguf = tmp_path / "critic.gguf"
    gguf.write_bytes(b"GGUF")
    write_caddie_json(gguf, mine)
    assert find_pack(mine) is mine
    assert find_pack("household") == load_pack("household")
    assert find_pack(gguf).prompt == mine.prompt
    assert find_pack(str(tmp_path / "critic.caddie.json")).prompt == mine.prompt
    (tmp_path / "search").mkdir()
    write_caddie_json(tmp_path / "search", mine)
    monkeypatch.chdir(tmp_path)
    assert find_pack("search").name == "search"
    assert find_pack("./search").name == "mine"
    with pytest.raises(PackError, match="no critic pack"):
        find_pack(tmp_path / "other.gguf")


# ------------------------------------------------------------------ served ids


@given(name=st.text(), pack=packs)
def test_a_served_id_is_read_back(name: str, pack: Pack) -> None:
    model_id = served_id(name, pack)
    parsed = parse_served_id(model_id)
    assert parsed is not None
    again, pack_name, digits = parsed
    assert (pack_name, digits) == (pack.name, pack.hash[:8])
    assert served_id(again, pack) == model_id, "what was cleaned stays as it is"
    assert not any(char.isspace() or char == "," for char in model_id)
    if name and not any(char.isspace() or char == "," or ord(char) < 32 or ord(char) == 127 for char in name):
        assert again == name


@pytest.mark.parametrize(
    "model_id",
    [
        "",
        "gpt-5",
        "tiny@search",
        "tiny@search-123",
        "@search-12345678",
        "tiny@search-1234567G",
        "tiny@-12345678",
        "a@Search-12345678",
        "a@search-12345678\n",
    ],
)
def test_other_ids_are_not_served_ids(model_id: str) -> None:
    assert parse_served_id(model_id) is None


def test_the_form_of_a_served_id_is_pinned() -> None:
    assert served_id("my critic,v2", SEARCH) == f"my_critic_v2@search-{SEARCH.hash[:8]}"
    assert parse_served_id("org/critic@v2@my-pack-2-0123abcd") == ("org/critic@v2", "my-pack-2", "0123abcd")
    with pytest.raises(PackError, match="lower-case"):
        served_id("x", Pack(replace(SEARCH.prompt, name="My Pack"), "1"))


def test_no_two_packs_share_a_served_id() -> None:
    assert len({served_id("x", load_pack(name)) for name in list_packs()}) == len(list_packs())
