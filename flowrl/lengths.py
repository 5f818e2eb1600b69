"""One value for each response token: the check that every edge makes."""

from __future__ import annotations

from .columns import *  # noqa
