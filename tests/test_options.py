"""Tests of ``tracer.record.options``."""

from __future__ import annotations

import numpy as np
import torch

from tracer.record.options import TraceOptions


def test_nothing_is_asked_for_by_default() -> None:
    """No dump, no plan, no intervention unless the user says so."""
    options = TraceOptions()
    assert (options.dump, options.plan, options.against, options.feed, options.pin, options.perturb_ulps) == (None,) * 5 + (0,)


def test_options_are_kept_as_plain_values() -> None:
    """Iterators are read once, numbers of any kind become plain ones, one glob is a list of one."""
    options = TraceOptions(
        tokens=iter([3, np.int64(1), torch.tensor(2)]), level=np.int64(2), boundaries="layers.*", sequences=iter([0, 4]), dump="embedding"
    )
    assert (options.tokens, options.level, options.boundaries, options.sequences) == ((1, 2, 3), 2, ("layers.*",), [[4]])
    assert options.dump == ("embedding",)
