"""What models, passages and servers write cannot do anything to the terminal it is shown on."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from cli_kit import CADDIE, DEMO, NORVIA, Caddie
from hypothesis import given
from hypothesis import strategies as st
from openai_server import Said, Server, agent

from caddie_sdk.cli.terminal import plain

RICH = "[bold red]x[/bold red] [/] [link=http://e.vil]y[/link] :smile: [not a tag"
CONTROL = "\x1b[31mred\x1b[0m\x1b]0;title\x07\x9b2J\x7f\x08\u202etxt.exe\u202c\rover\nwritten\x85\u2028\t|"


@given(st.text())
def test_plain_text_has_no_control_characters_and_is_one_line(text: str) -> None:
    shown = plain(text)
    assert {unicodedata.category(character) for character in shown} & {"Cc", "Cs", "Zl", "Zp"} == set()
    shown.encode()
    assert plain(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (RICH, RICH),
        ("two\nlines\tand  blanks", "two lines and blanks"),
        ("\x1b[31mred\x1b[0m", "[31mred[0m"),
        ("half \ud800 pair", "half \ufffd pair"),
        ("x\u202eexe.txt", "xexe.txt"),
        ("漢字, naïve, 👩\u200d🚀, می\u200cخواهم", "漢字, naïve, 👩\u200d🚀, می\u200cخواهم"),
    ],
)
def test_plain(text: str, shown: str) -> None:
    assert plain(text) == shown


def no_control(text: str) -> None:
    """Only line ends may be there of all that a terminal acts upon."""
    assert {character for character in text if unicodedata.category(character) == "Cc"} <= {"\n"}
    assert "\u202e" not in text


def test_nothing_an_agent_critic_or_passage_says_is_interpreted(
    caddie: Caddie, model: tuple[str, ...], server: Server, tmp_path: Path
) -> None:
    nasty = RICH + CONTROL
    server.behaviour = agent(
        query="Greave " + nasty,
        answer="answer " + nasty,
        critique=f"Analysis: {nasty}\nAdvices for next steps: advice {nasty}",
    )
    passage = {"id": "1" + nasty, "title": "Greave " + nasty, "text": "Lighthouse " + nasty}
    (tmp_path / "p.jsonl").write_text(json.dumps(passage))
    done = caddie("ask", "question " + nasty, "--passages", tmp_path / "p.jsonl", *model)
    assert (done.code, done.err) == (0, "")
    no_control(done.out)
    for said in ("question ", "Greave ", "advice ", "answer "):
        assert said + RICH in done.out
    assert "\\u001b[31m" in done.out  # the search call shows its arguments as JSON, where they are escaped


def test_the_table_interprets_nothing(caddie: Caddie, model: tuple[str, ...], server: Server, tmp_path: Path) -> None:
    server.behaviour = agent(answer="[red]\x1b[31mA[/] and a long tale of the lighthouse")
    rows = [json.loads(line) for line in DEMO.read_text().splitlines()[:2]]
    rows[0]["id"], rows[1]["id"] = "[b]\x1b[1mid", "3hop1__123456_123456_123456"
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = caddie("ask", "--musique", tmp_path / "m.jsonl", *model)
    assert done.code == 0
    table = done.out[done.out.index("2 questions") :]
    no_control(table)
    assert "[b][1mid" in table
    assert "[red][31mA[/] and a…" in table
    assert max(map(len, table.splitlines())) <= 80


def test_errors_interpret_nothing_and_are_one_line(
    caddie: Caddie, model: tuple[str, ...], server: Server, tmp_path: Path
) -> None:
    server.models = ("evil\x1b[31m\nname", ":smile:")
    done = caddie("ask", "Who?", "--passages", NORVIA, *model)
    assert done.error.endswith("it lists: evil[31m name, :smile:")
    server.models = ("scripted",)
    server.behaviour = lambda _: Said(400, {"error": {"message": "[bold]\x1b]0;x\x07 :smile:\nline two"}})
    done = caddie("ask", "Who?", "--passages", NORVIA, *model)
    assert done.error.endswith("[bold]]0;x :smile: line two")
    no_control(done.out)
    file = tmp_path / "\x1b[31m:smile:.jsonl"
    file.write_text('{"text": 3}\n')
    done = caddie("ask", "Who?", "--passages", file, *model)
    no_control(done.err)
    assert ":smile:" in done.err


class Screen(io.StringIO):
    """A terminal, as far as rich can tell."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_only_our_own_colours_are_there(
    caddie: Caddie, model: tuple[str, ...], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.behaviour = agent(answer="\x1b]0;title\x07\x1b[2Jgone")
    (tmp_path / "p.txt").write_text("\x1b[5mblink")
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert caddie("ask", "blink?", "--passages", tmp_path / "p.txt", *model).code == 0
    text = screen.getvalue()
    assert "\x1b[1;35m" in text  # our bold magenta
    for theirs in ("\x1b]0;", "\x07", "\x1b[2J", "\x1b[5m"):
        assert theirs not in text


def test_a_terminal_that_knows_only_ascii(model: tuple[str, ...], server: Server, tmp_path: Path) -> None:
    server.behaviour = agent(query="Łódź", answer="Łódź…")
    (tmp_path / "p.txt").write_text("Łódź " * 200)
    command = [CADDIE, "ask", "Łódź?", "--passages", str(tmp_path / "p.txt"), *model]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "  answer   ??d?" in done.stdout
