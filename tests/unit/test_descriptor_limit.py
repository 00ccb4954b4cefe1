"""A worker raises its limit of file descriptors, and never lowers it."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from connector import descriptor_limit
from connector.descriptor_limit import raise_descriptor_limit

BEFORE = resource.getrlimit(resource.RLIMIT_NOFILE)
LOWERED = 512


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, BEFORE)


def test_the_soft_limit_rises_to_the_hard_one(caplog: pytest.LogCaptureFixture) -> None:
    _, hard = BEFORE
    resource.setrlimit(resource.RLIMIT_NOFILE, (LOWERED, hard))
    with caplog.at_level("INFO"):
        raise_descriptor_limit()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == (
        descriptor_limit.DESCRIPTORS_MAX
        if hard == resource.RLIM_INFINITY
        else min(hard, descriptor_limit.DESCRIPTORS_MAX)
    )
    assert f"{soft} file descriptors now, up from {LOWERED}" in caplog.text


def test_a_limit_that_is_high_enough_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (LOWERED, BEFORE[1]))
    monkeypatch.setattr(descriptor_limit, "DESCRIPTORS_MAX", LOWERED - 1)
    with caplog.at_level("INFO"):
        raise_descriptor_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (LOWERED, BEFORE[1])
    assert not caplog.text


def test_a_limit_that_cannot_be_raised_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (LOWERED, BEFORE[1]))

    def refuse(*_: object) -> None:
        raise PermissionError("not permitted, on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(resource, "setrlimit", refuse)
        raise_descriptor_limit()
    assert "on purpose" in caplog.text
