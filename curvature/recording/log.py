"""Warnings that are logged once, however often their cause recurs."""

import logging
from functools import cache

warn_once = cache(logging.getLogger("curvature").warning)
