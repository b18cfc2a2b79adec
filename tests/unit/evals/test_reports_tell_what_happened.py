"""One value, three forms: the numbers are right, and every form is well-formed whatever agents wrote."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bs4 import BeautifulSoup

from polar.errors import InvalidInput
from polar.evals.comparison import compare
from polar.evals.documents import comparison_files, report_files, write
from polar.evals.report import Gate, Report, TaskOutcome, below_gates, cell_of, load_report, parse_gate
from polar.evals.statistics import Method
from polar.models.session import SessionStatus
from tests.fakes.reports import attempt, cell, report

HOSTILE = '<script>alert(1)</script> | `x` \x1b[2J & "quoted" \uffff \u202e'

Rewards = dict[str, list[float | None]]
EASY: Rewards = {"a": [1.0, 1.0, 0.0, 0.0], "b": [0.0, 0.5, 0.0, None], "c": [1.0, 1.0, 1.0, 1.0]}
HARD: Rewards = {"a": [0.0, 0.0, 0.0, 0.0], "b": [0.0, 0.0, 1.0, None], "c": [1.0, 1.0, 1.0, 0.0]}


def full() -> Report:
    ks = (1, 2, 4)
    return report(cell(EASY, ks=ks), cell(HARD, harness="codex", ks=ks), ks=ks, samples=4, seed=7)


def hostile() -> Report:
    rotten = [attempt("t", 0, None, error=HOSTILE), attempt("t", 1, 0.0, excluded={HOSTILE[:40]: 3})]
    tasks = [TaskOutcome(id="t", digest="d", attempts=tuple(rotten))]
    return report(cell_of(HOSTILE, HOSTILE, HOSTILE, tasks, threshold=1.0, ks=(1,)), samples=2)


def test_metrics_are_means_over_tasks() -> None:
    metrics = cell(EASY, ks=(1, 2, 4)).metrics
    assert metrics["pass@1"].value == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert metrics["pass@2"].value == pytest.approx((5 / 6 + 0.0 + 1.0) / 3)
    assert metrics["pass@4"].value == pytest.approx((1.0 + 0.0 + 1.0) / 3)
    assert metrics["pass@4"].method is Method.WILSON
    assert metrics["pass@1"].method is Method.BOOTSTRAP
    assert metrics["mean_reward"].value == pytest.approx((0.5 + 0.125 + 1.0) / 3)
    assert metrics["completed"].value == pytest.approx(11 / 12)


def test_one_task_has_no_interval(tmp_path: Path) -> None:
    made = report(cell({"a": [1.0, 0.0]}), samples=2)
    write(report_files(made), tmp_path)
    written = [path for path in tmp_path.iterdir() if path.suffix in (".md", ".html")]
    texts = [path.read_text().replace("\\", "") for path in written]
    assert texts
    for text in texts:
        assert "0.500 [n/a: one task]" in text
        assert "[0.50, 0.50]" not in text
        assert "from 0.500 to 0.500" not in text


def test_a_cancelled_session_is_no_attempt() -> None:
    cancelled = attempt("t", 1, None, status=SessionStatus.CANCELLED)
    tasks = [TaskOutcome(id="t", digest="d", attempts=(attempt("t", 0), cancelled))]
    made = cell_of("set", "pi", "small", tasks, threshold=1.0, ks=(1, 2))
    assert made.metrics["pass@1"].value == 1.0
    assert "pass@2" not in made.metrics
    assert made.cost.sessions == 1
    assert made.failures == {"cancelled": 1}


def test_cost_and_failures_add_up() -> None:
    made = cell(EASY)
    assert made.cost.sessions == 12
    assert made.cost.prompt_tokens == 1200
    assert made.cost.cached_tokens == 480
    assert list(made.failures.items()) == [("agent finished, reward too low", 5), ("failed: no sandbox", 1)]


def test_a_report_comes_back_from_its_json(tmp_path: Path) -> None:
    made = full()
    write(report_files(made), tmp_path)
    assert load_report(tmp_path) == made
    assert load_report(tmp_path / "report.json") == made
    assert report_files(load_report(tmp_path)) == report_files(made)


@pytest.mark.parametrize("make", [full, hostile])
def test_html_is_one_file_that_asks_for_nothing_else(make: Callable[[], Report]) -> None:
    made = make()
    page = report_files(made, compare(made, made))["report.html"]
    page.encode()
    soup = BeautifulSoup(page, "html.parser")
    assert not soup.find_all(["script", "link", "img", "iframe", "object"])
    assert not re.search(r"\b(?:src|href)\s*=|url\(|@import", page)
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert soup.find("meta", {"name": "viewport"})
    assert "prefers-color-scheme: dark" in page
    for table in soup.find_all("table"):
        widths = {len(row.find_all(["td", "th"])) for row in table.find_all("tr")}
        assert len(widths) == 1
        assert table.parent is not None
        assert "wide" in table.parent["class"]


@pytest.mark.parametrize("make", [full, hostile])
def test_plots_are_whole_xml_inside_their_frame(make: Callable[[], Report]) -> None:
    made = make()
    drawn = {name: text for name, text in report_files(made, compare(made, made)).items() if "svg" in name}
    assert {"plots/pass-at-k.svg", "plots/tasks.svg", "plots/failures.svg", "plots/comparison.svg"} <= set(
        drawn
    )
    for text in drawn.values():
        root = ElementTree.fromstring(text)
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        for element in root.iter():
            x, y = (float(element.attrib.get(name, 0)) for name in ("x", "y"))
            assert 0 <= x + float(element.attrib.get("width", 0) if element.tag != root.tag else 0) <= width
            assert 0 <= y <= height


@pytest.mark.parametrize("make", [full, hostile])
def test_markdown_tables_have_as_many_cells_in_every_row(make: Callable[[], Report]) -> None:
    made = make()
    files = report_files(made, compare(made, made))
    text = files["report.md"]
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) >= 5
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
    assert "<script>" not in text
    for name in re.findall(r"\]\((.+?)\)", text):
        assert name in files


def test_a_comparison_has_all_its_forms() -> None:
    files = comparison_files(compare(full(), full()))
    assert set(files) == {"comparison.md", "comparison.html", "comparison.json"}
    assert BeautifulSoup(files["comparison.html"], "html.parser").find("svg")


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "contains no report.json"), ("{}", "not a report of this version"), ("nonsense", "not a report")],
)
def test_a_directory_without_a_sound_report_is_refused(
    tmp_path: Path, content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(InvalidInput, match=said):
        load_report(tmp_path)


def test_a_gate_names_every_cell_that_stays_below() -> None:
    lines = below_gates(full(), [Gate("pass@1", 0.5), Gate("pass@4", 0.99)])
    assert len(lines) == 3
    assert "codex" in lines[0]
    assert "pass@1 is 0.333, below 0.5" in lines[0]


def test_a_gate_at_the_value_itself_is_passed() -> None:
    assert not below_gates(full(), [Gate("pass@1", 1 / 3)])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pass@1", "is not METRIC=MINIMUM"),
        ("pass@3=0.5", r"unknown metric 'pass@3' .*did you mean pass@"),
        ("speed=1", "unknown metric 'speed' .*known: pass@1, pass@2, mean_reward, completed"),
        ("pass@1=high", "'high' is not a number"),
        ("pass@1=nan", "'nan' is not a number"),
    ],
)
def test_a_gate_that_cannot_be_checked_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidInput) as error:
        parse_gate(text, (1, 2))
    assert re.search(said, str(error.value))
