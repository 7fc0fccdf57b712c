"""A plan as a page of HTML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from autoshard.ir.execution import Execution
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import NodePlan, OperatorCoverage, ParameterPlan, Prediction
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.trace import Trace
from autoshard.report.page import WIDTH, lanes, render_page

SPLIT = PartitionSpec("x")
TIMELINE = Trace.of(
    ["each rank"], [(0, "compute", "mm", 0.0, 1e-3), (0, "communication over x", "all-reduce", 1e-3, 2e-3)]
)
PLAN = Plan(
    mesh=Mesh({"x": 2}), program_digest="", inputs={}, nodes={"mm": NodePlan((SPLIT,), (SPLIT,))},
    outputs={"output <loss>": PartitionSpec()},
    parameters={f"layers.{index}.weight": ParameterPlan(SPLIT, (8, 4), 64) for index in range(3)},
    predicted=Prediction(
        2e-3, 3 * 2**30, {"forward compute": 1.5e-3, "communication over x": 5e-4},
        {"parameters": 2**31, "activations": 2**30}, mfu=0.5, timeline=TIMELINE,
    ),
    objective=2e-3, lower_bound=None, search_time_s=0.0, hardware="h100_sxm:1x2",
    baselines={"data parallel": 3e-3, "fully sharded data parallel": None},
    operators=(OperatorCoverage("aten.mm.default", "model.py:3 in forward", True, True, 4, 1e-3, 0.0),),
)  # fmt: skip


class _Page(HTMLParser):
    """A parsed page: its text, the tags that are still open, and its references."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.open: list[str] = []
        self.references: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_says_what_the_plan_is() -> None:
    """The page is well-formed and refers to nothing outside. It shows the plan's figures, with names escaped."""
    page = _Page(render_page(PLAN))
    text = " ".join(" ".join(page.text).split())
    assert not page.open
    assert not page.references
    for part in (
        "step 2 ms", "forward compute 1.5 ms (75.0%)", "parameters 2.00 GiB (66.7%)", "each rank: compute",
        "layers.*.weight 3 8x4 P('x')", "data parallel 3 ms 1.50 x", "fully sharded data parallel does not fit",
        "aten.mm.default model.py:3 in forward split 4 1 ms", "output <loss>", "mm: 1 ms from 0 ns",
    ):  # fmt: skip
        assert part in text


def test_what_a_plan_does_not_have_is_left_out() -> None:
    """A plan without timeline, baselines or operators has no headings for them."""
    bare = replace(PLAN, predicted=replace(PLAN.predicted, timeline=None), baselines={}, operators=())
    text = render_page(bare)
    for heading in ("Timeline", "Known recipes", "Operators"):
        assert heading in render_page(PLAN)
        assert heading not in text


def test_report_writes_the_page(tmp_path: Path) -> None:
    """`Plan.report` writes the page of `render_page`."""
    PLAN.report(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == render_page(PLAN)


_DURATIONS = st.lists(st.tuples(st.sampled_from(("a", "b")), st.integers(1, 10**6), st.integers(0, 10**5)), max_size=60)


@given(durations=_DURATIONS)
def test_every_span_is_drawn_in_its_place(durations: list[tuple[str, int, int]]) -> None:
    """The drawn pieces of each stream do not overlap, and together count all of its spans."""
    clock: dict[str, int] = {}
    spans = []
    for number, (stream, duration, pause) in enumerate(durations):
        start = clock.get(stream, 0) + pause
        clock[stream] = start + duration
        spans.append((0, stream, f"op{number}", start / 1e9, clock[stream] / 1e9))
    found = lanes(Trace.of(["rank"], spans))
    assert len(found) == len(clock)
    for lane in found:
        assert sum(_count(piece.name) for piece in lane.pieces) == sum(lane.name == f"rank: {s[1]}" for s in spans)
        for before, after in zip(lane.pieces, lane.pieces[1:], strict=False):
            assert before.left + before.width <= after.left + 2e-3
        assert all(piece.left >= 0 and piece.left + piece.width <= WIDTH + 2e-3 for piece in lane.pieces)


def _count(name: str) -> int:
    """How many spans a piece represents, by its name."""
    return int(name.split()[0]) if " operators from " in name else 1


def test_a_schedule_is_drawn_in_the_colours_of_its_work() -> None:
    """A pipeline's timeline has a colour and a legend for each kind of work, and other timelines have
    no such legend."""
    names = ("0F0", "1F0", "1I0", "1W0", "0B0")
    spans = [(0, "compute", name, number * 1e-3, (number + 1) * 1e-3) for number, name in enumerate(names)]
    trace = Trace.of(["pipeline rank 0"], [*spans, (0, "compute", "update", 5e-3, 6e-3)])
    colours = [piece.colour for piece in lanes(trace)[0].pieces]
    assert colours[0] == colours[1]
    assert len(set(colours[1:])) == 5
    page = render_page(replace(PLAN, predicted=replace(PLAN.predicted, timeline=trace)))
    for work in ("forward", "backward, of inputs", "backward, of weights", "backward"):
        assert f"</i>{work} <b>" in page
    assert "</i>forward <b>" not in render_page(PLAN)


def test_a_bar_leaves_out_what_is_nothing() -> None:
    """Parts of zero time are not in the legend."""
    parts: Mapping[str, float] = {"forward compute": 1e-3, "copies": 0.0}
    assert "copies" not in render_page(replace(PLAN, predicted=replace(PLAN.predicted, breakdown=parts)))


def test_a_page_says_what_is_planned() -> None:
    """The page has the recipe, the sequences of a step, the priced runtime, or the call of `compile` that runs the
    plan."""
    priced = replace(PLAN, recipe=Execution(data=2, micro_batch=8).recipe, runtime="megatron")
    text = " ".join(_Page(render_page(priced)).text)
    assert "Recipe: data 2" in text
    assert "Batch: 16 sequences." in text
    assert "The price of a run under runtime='megatron'." in text
    text = " ".join(_Page(render_page(PLAN)).text)
    assert "compile(model, Mesh(x=2), plan=plan) runs it." in text
