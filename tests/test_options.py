"""Tests of ``tracer.record.options``."""

from __future__ import annotations

import numpy as np
import pytest

from tracer.errors import Code, UsageError
from tracer.record.options import TraceOptions, position_filter, weights_mode


def test_nothing_is_asked_for_by_default() -> None:
    """No dump, no plan, no intervention unless the user says so."""
    options = TraceOptions()
    assert (options.dump, options.plan, options.against, options.feed, options.pin, options.perturb_ulps) == (None,) * 5 + (0,)


@pytest.mark.parametrize(
    ("tokens", "kept"), [(slice(2, 7, 2), [2, 4, 6]), ([5, 1, 5], [1, 5]), (range(3), [0, 1, 2]), (slice(7, None), [7, 8])]
)
def test_positions_are_chosen_from_the_start(tokens: object, kept: list[int]) -> None:
    """Slices, ranges and lists of positions keep exactly those."""
    wanted = position_filter(tokens)  # type: ignore[arg-type]
    assert wanted is not None
    assert np.flatnonzero(wanted(np.arange(9))).tolist() == kept


def test_arguments_that_make_no_sense_are_refused() -> None:
    """Positions from the end and unknown weight modes are usage errors."""
    assert position_filter(None) is None
    assert [weights_mode(given) for given in (True, False, None, "rows")] == ["digest", "none", "none", "rows"]
    for act in (lambda: position_filter(slice(-3, None)), lambda: position_filter([-1]), lambda: weights_mode("all")):
        with pytest.raises(UsageError) as caught:
            act()
        assert caught.value.code is Code.BAD_ARGUMENT
