"""Warnings that are logged once, however often their cause recurs."""

import logging
from functools import cache
from typing import Any


@cache
def warn_once(message: str, *args: Any, logger: str = "curvature") -> None:
    logging.getLogger(logger).warning(message, *args)
