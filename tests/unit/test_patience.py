"""Time limits grow with the machine: load does not turn green into red."""

import pytest
from support import patience
from support.patience import seconds


def test_limits_are_multiplied(monkeypatch):
    monkeypatch.setenv("REDIVIDER_PATIENCE", "3")
    assert seconds(2) == 6


@pytest.mark.parametrize("slowness, factor", [(0.5, 2), (1, 2), (4, 8)])
def test_the_factor_is_measured_once_and_inherited(slowness, factor, monkeypatch):
    monkeypatch.delenv("REDIVIDER_PATIENCE")
    monkeypatch.setattr(patience, "_measure", lambda: slowness * patience.IDLE)
    assert patience.patience() == factor
    monkeypatch.setattr(patience, "_measure", lambda: 1 / 0)
    assert patience.patience() == factor  # from the environment


def test_every_test_has_such_a_limit(request):
    usual = float(request.config.getini("timeout"))
    assert request.node.get_closest_marker("timeout").args[0] == seconds(usual)


@pytest.mark.timeout(7)
def test_its_own_limit_grows_too(request):
    assert request.node.get_closest_marker("timeout").args[0] == seconds(7)
