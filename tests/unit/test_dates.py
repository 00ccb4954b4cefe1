"""Dates that chat templates write into prompts: where they come from, and what is told of it."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from connector.observe.advice import WHAT_TO_DO
from connector.worker.engine_facts import SHOWN_VARIABLES, _utc_offsets

EASTERNMOST, WESTERNMOST = "XXX-14", "YYY+12"
"""More than a day apart, so there is a date on each side at every moment."""


@pytest.fixture
def live_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def move(zone: str) -> None:
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    yield move
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("zone", "said"),
    [
        ("UTC0", "UTC+00:00"),
        ("IST-5:30", "UTC+05:30"),
        ("NST3:30NDT,M3.2.0,M11.1.0", "UTC-03:30 or UTC-02:30"),
        ("CET-1CEST,M3.5.0,M10.5.0/3", "UTC+01:00 or UTC+02:00"),
    ],
)
def test_an_engine_says_its_local_time_for_all_the_year(live_in: Callable[[str], None], zone: str, said: str) -> None:
    live_in(zone)
    assert _utc_offsets() == said


def test_a_template_makes_two_prompts_of_one_in_two_time_zones(live_in: Callable[[str], None]) -> None:
    template = "{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}"
    prompts, offsets = [], []
    for zone in (EASTERNMOST, WESTERNMOST):
        live_in(zone)
        ((prompt,), _) = render_jinja_template([[{"role": "user", "content": "x"}]], chat_template=template)
        assert prompt == f"{datetime.datetime.now():%d %b %Y}: x"
        prompts.append(prompt)
        offsets.append(_utc_offsets())
    assert prompts[0] != prompts[1]
    assert offsets == ["UTC+14:00", "UTC-12:00"]


def test_who_gets_another_prompt_is_told_to_look_at_the_date() -> None:
    assert "date" in WHAT_TO_DO["WrongPrompt"]
    assert "VLLM_SYSTEM_START_DATE" in SHOWN_VARIABLES
