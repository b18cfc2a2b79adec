import unittest

from backoff import retry


class RetryTest(unittest.TestCase):
    def setUp(self):
        self.calls = 0
        self.pauses = []

    def flaky(self, failures, error=OSError):
        def function(value):
            self.calls += 1
            if self.calls <= failures:
                raise error(self.calls)
            return value

        return function

    def test_success_at_once(self):
        self.assertEqual(retry(sleep=self.pauses.append)(self.flaky(0))("x"), "x")
        self.assertEqual(self.pauses, [])

    def test_success_after_failures(self):
        self.assertEqual(retry(sleep=self.pauses.append)(self.flaky(2))("x"), "x")
        self.assertEqual(self.pauses, [0.5, 1.0])

    def test_other_errors_pass(self):
        with self.assertRaises(KeyError):
            retry(on=(OSError,), sleep=self.pauses.append)(self.flaky(1, KeyError))("x")
        self.assertEqual(self.calls, 1)
