"""Suppresses the warnings of libraries about models, since their faults are reported as errors."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(library: str) -> Iterator[None]:
    """Suppresses the warnings of a library while the block runs."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
