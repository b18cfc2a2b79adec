"""What every runtime promises, checked on real Docker and podman."""

from __future__ import annotations

from tests.conformance import *  # noqa: F403 - the tests themselves
