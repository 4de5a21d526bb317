"""What every controller holds to, and the rules of `fixed` and `threshold` one by one."""

from __future__ import annotations

import inspect

import pytest

from tests.control.views import VIEW, snapshot, view
from verifypd.control import controller as module
from verifypd.control import throughput
from verifypd.control.controller import FixedController, ThresholdController
from verifypd.control.factory import make_controller
from verifypd.control.observe import Observation, StepTiming
from verifypd.control.prompts import Reading
from verifypd.control.snapshot import RequestView
from verifypd.errors import ConfigError
from verifypd.simulate.tables import h200

# --- fixed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 4),
        ({"draft_limit": 2}, 2),
        ({"expected": 0}, 0),
        ({"expected": 3}, 3),
        ({"max_length": 515}, 2),
        ({"max_length": 513}, 0),
        ({"draft_limit": 0}, 0),
    ],
)
@pytest.mark.parametrize("name", ["fixed", "threshold", "throughput"])
def test_every_controller_respects_limit_drafter_and_room(name: str, changes: dict[str, int], length: int) -> None:
    controller = make_controller(name, 4, h200())
    views = [view(0, **changes), view(1)]
    lengths = controller.draft_lengths(views, snapshot(views), Reading())
    assert lengths.get(0, 0) <= length
    if name != "throughput":
        assert lengths.get(0, 0) == length
    assert set(lengths) <= {0, 1} and all(value > 0 for value in lengths.values())


def test_fixed_is_fixed() -> None:
    controller = FixedController(3)
    assert controller.draft_lengths([view(7)], snapshot([view(7)]), Reading()) == {7: 3}
    assert controller.temperature(view(7)) == 1.0


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="throughput, threshold, fixed"):
        make_controller("magic", 4)


# --- threshold, rule by rule ------------------------------------------------------------------------------------------


def ten(controller: ThresholdController, drafted: int, emitted: int) -> None:
    for request in range(10):
        controller.observe(Observation(request, drafted, emitted - 1, emitted, False, False, 1.0, "model"))


def steps(controller: ThresholdController, seconds: float, count: int = 100, wait: float = 0.0) -> None:
    for _ in range(count):
        controller.observe_step(StepTiming(draft_requests=1, draft_seconds=seconds, decode_wait=wait))


def queue(controller: ThresholdController, depth: int) -> None:
    views = [view(i, pending=2) for i in range(depth)]
    controller.draft_lengths([], snapshot(views), Reading())


def test_threshold_starts_at_four_and_moves_every_ten_observations() -> None:
    controller = ThresholdController()
    assert controller.length == 4
    for request in range(9):
        controller.observe(Observation(request, 4, 4, 5, False, False, 1.0, "model"))
        controller.observe(Observation(request, 0, 0, 1, False, False, 1.0, None))  # no draft: not an observation
    assert controller.length == 4
    controller.observe(Observation(9, 4, 4, 5, False, False, 1.0, "model"))
    assert controller.length == 5


@pytest.mark.parametrize(
    ("depth", "p95", "emitted", "length", "tau"),
    [
        (0, 0.010, 9, 5, 1.0),  # all well: one up
        (1, 0.044, 7, 5, 1.0),  # the limits themselves still count as well
        (2, 0.010, 9, 4, 1.0),  # the queue is not short enough to go up
        (0, 0.046, 9, 4, 1.0),  # nor is the p95
        (0, 0.010, 6, 4, 1.0),  # nor the rate: 0.6
        (11, 0.010, 9, 3, 1.1),  # a long queue: one down, and hotter
        (10, 0.010, 9, 4, 1.0),
        (0, 0.051, 9, 3, 1.1),  # slow steps: the same
        (0, 0.010, 3, 3, 1.0),  # a rate of 0.3: one down, not hotter
        (0, 0.010, 4, 4, 1.0),
    ],
)
def test_threshold_rules(depth: int, p95: float, emitted: int, length: int, tau: float) -> None:
    controller = ThresholdController()
    steps(controller, p95)
    queue(controller, depth)
    ten(controller, drafted=10, emitted=emitted)  # the rate counts the correction token: emitted / drafted
    assert (controller.length, controller.temperature(VIEW)) == (length, pytest.approx(tau))


def test_threshold_stays_within_two_and_eight() -> None:
    controller = ThresholdController()
    for _ in range(10):
        ten(controller, 4, 5)
    assert controller.length == 8
    for _ in range(10):
        ten(controller, 4, 1)
    assert controller.length == 2
    assert ThresholdController(3).length == 3


def test_threshold_p95_is_over_the_last_hundred_steps_with_the_queue_wait() -> None:
    controller = ThresholdController()
    steps(controller, 0.2)
    steps(controller, 0.01, count=94)
    assert controller.p95 == pytest.approx(0.2), "six of the last hundred were slow"
    steps(controller, 0.01, count=2)
    assert controller.p95 == pytest.approx(0.01)
    steps(controller, 0.01, wait=0.05)
    assert controller.p95 == pytest.approx(0.06)
    controller.observe_step(StepTiming(verify_rows=1, verify_seconds=9.0))  # not a step of the decode lane
    assert controller.p95 == pytest.approx(0.06)


# --- exactness --------------------------------------------------------------------------------------------------------


def test_no_controller_ever_sees_a_drawn_token() -> None:
    """Lengths that depended on a drawn token would bias the text: nothing handed to a controller can hold one."""
    for record in (Observation, StepTiming, RequestView):
        for name, kind in record.__annotations__.items():
            kinds = ("int", "float", "bool", "str", "str | None", "float | None", "tuple[int, int]")
            assert getattr(kind, "__forward_arg__", kind) in kinds, name
            assert "token" not in name and "draft_ids" not in name
    members = [*inspect.getmembers(module, inspect.isclass), *inspect.getmembers(throughput, inspect.isclass)]
    classes = {c for _, c in members if c.__name__.endswith("Controller")}
    allowed = {
        "draft_lengths": {"views", "snapshot", "riding"},
        "temperature": {"view"},
        "observe": {"seen"},
        "observe_step": {"timing"},
        "forget": {"request_id"},
        "why": set(),
        "state": set(),
    }
    assert len(classes) == 4
    for controller in classes:
        for name, method in inspect.getmembers(controller, inspect.isfunction):
            if not name.startswith("_"):
                assert set(inspect.signature(method).parameters) - {"self"} == allowed[name], (controller, name)
