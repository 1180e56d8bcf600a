"""What the tests of pictures share."""

from collections.abc import Callable

import matplotlib.pyplot as plt
import pytest


def assert_refused(call: Callable[[], object], kind: type[Exception], text: str, own_figure: bool) -> None:
    """It raises, and leaves no empty figure behind but one that the call made itself."""
    before = len(plt.get_fignums())
    with pytest.raises(kind, match=text):
        call()
    assert len(plt.get_fignums()) == before or own_figure
