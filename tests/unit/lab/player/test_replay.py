"""Replays: their contents and costs are those of the algorithm; their pages load nothing and embed any text safely."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import unisono as un
from unisono.collectives.algorithms import Algorithm, Move, Step
from unisono.lab.player import from_algorithm
from unisono.lab.player.from_algorithm import replay_algorithm
from unisono.lab.player.from_trace import replay_trace
from unisono.lab.player.replay import Change, Replay, render
from unisono.lab.simulator import Message
from unisono.tools.cli import main

ALGORITHMS = un.algorithms.ALGORITHMS
NAMES = [(collective, name) for collective in ALGORITHMS for name in ALGORITHMS[collective].names()]
HOSTILE = "</script><script>alert(1)</script> <!-- {{data}} & 'é' \u2028"
VOID = {"meta", "link", "input", "br"}


class Document(HTMLParser):
    """The elements of a page, which must be nested properly; the text of the replay; the ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.scripts: list[str] = []
        self.title = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] == "title":
            self.title += data


def embedded(text: str) -> Any:
    return json.loads(Document(text).scripts[0])


def final(replay: Replay) -> list[list[int]]:
    """The contents after the last change."""
    contents = [list(row) for row in replay.start]
    for change in replay.changes:
        contents[change.rank][change.chunk] = change.members
    return contents


@pytest.mark.parametrize(("collective", "name"), NAMES)
def test_replay_reaches_the_goal_at_the_declared_cost(collective: str, name: str) -> None:
    algorithm = un.algorithms.find(collective, name)
    for size in (1, 2, 3, 4, 8, 13):
        if algorithm.unsupported(size):
            continue
        nbytes = 96 * size if algorithm.uniform else 1000
        replay = replay_algorithm(algorithm, size, nbytes)
        for held, wanted in zip(final(replay), replay.goal, strict=True):
            assert all(members == goal for members, goal in zip(held, wanted, strict=True) if goal)
        cost, sent, counts = algorithm.cost(size, nbytes), [0] * size, [0] * size
        for message in replay.messages:
            sent[message.sender] += message.nbytes
            counts[message.sender] += 1
        assert max((message.end_s for message in replay.messages), default=0) == cost.rounds
        assert max(counts) == cost.messages
        assert max(sent) == (0 if collective == "barrier" else cost.sent)
        times = [change.time_s for change in replay.changes]
        assert times == sorted(times)


def test_ring_of_three_ranks() -> None:
    replay = replay_algorithm(un.algorithms.find("all_reduce", "ring"), 3, nbytes=12)
    assert replay.messages[0] == Message(0, 1, ((2, 3),), 4, 0, 1, reduce=True, step=1)
    assert Change(1, rank=1, chunk=2, members=0b011) in replay.changes
    assert replay.title == "all_reduce by ring"
    assert replay.about.startswith("Ring all-reduce")


def test_step_sends_what_was_held_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 sends to rank 2, which is late, after it has received from rank 0 in the same step."""
    programs = [
        [Step(send=(Move(1, 0, 1),))],
        [Step(send=(Move(2, 0, 1),), recv=(Move(0, 0, 1),), reduce=True)],
        [Step(recv=(Move(3, 0, 1),), reduce=True), Step(recv=(Move(1, 0, 1),), reduce=True)],
        [Step(send=(Move(2, 0, 1),))],
    ]
    # They are no collective, and no proof finds them right.
    monkeypatch.setattr(from_algorithm, "verify", lambda *_: None)
    file: Any = SimpleNamespace(steps=lambda rank, size: iter(programs[rank]), chunks=lambda size: 1)
    replay = replay_algorithm(Algorithm("all_reduce", "by hand", file), 4, nbytes=4)
    assert [(each.sender, each.start_s) for each in replay.messages] == [(0, 0), (3, 0), (1, 1)]
    assert replay.changes[-1] == Change(2, rank=2, chunk=0, members=0b1110)


@pytest.mark.parametrize("name", ["halving_doubling", "ring"])
def test_times_of_a_simulator(name: str) -> None:
    """Messages of one step that start and end one after the other carry what the step began with."""
    algorithm = un.algorithms.find("all_reduce", name)
    rounds = replay_algorithm(algorithm, 6, nbytes=600)
    times = {
        (each.sender, each.receiver, each.step, each.runs): (
            (each.start_s + each.receiver / 10) * 1e-5,
            (each.end_s + each.sender / 100) * 1e-5,
        )
        for each in rounds.messages
    }
    replay = replay_algorithm(algorithm, 6, 600, times)
    assert replay.unit == "s"
    assert final(replay) == final(rounds) == [*map(list, replay.goal)]
    assert {(each.start_s, each.end_s) for each in replay.messages} == set(times.values())
    assert [change.time_s for change in replay.changes] == sorted(change.time_s for change in replay.changes)


def test_page_loads_nothing() -> None:
    text = render(replay_algorithm(un.algorithms.find("all_to_all", "pairwise"), 4, nbytes=64))
    document = Document(text)
    assert len(document.ids) == len(set(document.ids))
    assert re.findall(r"(?:https?:)?//[\w.]+", re.sub(r"^ *//.*$", "", text, flags=re.MULTILINE)) == [
        "http://www.w3.org"
    ]
    assert re.findall(r'(?:src|href)="([^"]*)"', text) == ["data:,"]
    assert set(re.findall(r'\$\("([\w-]+)"\)', text)) - {"which"} <= set(document.ids)


def test_hostile_text_stays_text() -> None:
    replay = Replay(HOSTILE, HOSTILE, (HOSTILE, "rank 1"), messages=(Message(0, 1, (), 8, 0, 1, False, 1, HOSTILE),))
    text = render(replay)
    document, data = Document(text), embedded(text)
    assert (document.title, data["title"], data["about"], data["ranks"][0]) == (HOSTILE,) * 4
    assert len(document.scripts) == 2
    assert text.isascii() or HOSTILE not in text


def test_data_survives_the_page() -> None:
    replay = replay_algorithm(un.algorithms.find("all_reduce", "halving_doubling"), 6, nbytes=1 << 40)
    data = embedded(render(replay))
    assert [Message(*each)._replace(runs=tuple(map(tuple, each[2]))) for each in data["messages"]] == [*replay.messages]
    assert [Change(*each) for each in data["changes"]] == [*replay.changes]
    assert data["fields"] == {"messages": [*Message._fields], "changes": [*Change._fields]}


def test_too_many_ranks_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at most 32 ranks, not 33"):
        un.algorithms.play(tmp_path / "page.html", "all_reduce", "ring", 33)
    assert not list(tmp_path.iterdir())


def test_recorded_run(tmp_path: Path) -> None:
    path = tmp_path / "run.json"

    def program(comm: un.Communicator) -> None:
        import torch

        with un.trace(path, comm):
            comm.all_reduce(torch.ones(6), algorithm="ring")

    un.launch(program, 3, "thread")
    replay = replay_trace(json.loads(path.read_text()))
    ring = [message for message in replay.messages if message.call.startswith("all_reduce by ring #")]
    assert replay.unit == "s"
    assert replay.ranks == ("rank 0", "rank 1", "rank 2")
    assert len(ring) == 12
    assert all(message.nbytes == 8 and 0 <= message.start_s <= message.end_s for message in ring)
    assert all(message.receiver == (message.sender + 1) % 3 for message in ring)
    assert main(["play", "--trace", str(path), "-o", str(tmp_path / "run.html")]) == 0
    assert embedded((tmp_path / "run.html").read_text())["title"] == "a recorded run"


@pytest.mark.parametrize("document", [{}, [], {"traceEvents": [{"ph": "X"}]}, {"traceEvents": []}])
def test_document_without_messages_is_an_error(document: Any) -> None:
    with pytest.raises(ValueError, match=r"un\.trace"):
        replay_trace(document)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["all_reduce", "ring", "-n", "99"], "at most 32 ranks"),
        (["all_reduce"], "algorithms of all_reduce: .*ring"),
        (["all_reduce", "ring", "--option", "x"], "NAME=NUMBER"),
        (["all_reduce", "ring", "--option", "x=1"], "no option 'x'"),
        (["all_reduce", "ring", "--size", "1,2"], "one size"),
        ([], "or --trace FILE"),
        (["all_reduce", "--trace", "x"], "not both"),
        (["--trace", "missing.json"], "missing.json: No such file"),
    ],
)
def test_impossible_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["play", *words, "-o", str(tmp_path / "x.html")]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_command_writes_the_page(tmp_path: Path) -> None:
    path = tmp_path / "ring.html"
    assert main(["play", "all_reduce", "ring", "-n", "5", "--size", "1K", "-o", str(path)]) == 0
    assert len(embedded(path.read_text())["ranks"]) == 5


def test_template_is_package_data() -> None:
    assert (Path(from_algorithm.__file__).parent / "templates" / "player.html").is_file()


def test_page_shows_simulated_times(tmp_path: Path) -> None:
    network = un.algorithms.Network(alpha=1e-3, bandwidth=1e9)
    un.algorithms.play(tmp_path / "ring.html", "all_reduce", "ring", 4, nbytes=4000, network=network)
    # Six rounds of a message of 1000 bytes.
    assert "0.006006" in (tmp_path / "ring.html").read_text()
