"""Calling a function until it succeeds."""

import functools
import time

from backoff.delays import delays


def retry(attempts=3, on=(Exception,), sleep=time.sleep, **options):
    """A decorator: a call that raises one of `on` is made again, up to `attempts` times in all.

    Other exceptions are passed on at once, and so is that of the last attempt.
    """
    if attempts < 1:
        raise ValueError("attempts must be at least 1")

    def decorate(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            for pause in (*delays(attempts, **options), None):
                try:
                    return function(*args, **kwargs)
                except on:
                    if pause is not None:
                        sleep(pause)

        return call

    return decorate
