import unittest

from backoff import delays


class DelaysTest(unittest.TestCase):
    def test_growth(self):
        self.assertEqual(list(delays(4, first=1)), [1, 2, 4])

    def test_longest(self):
        self.assertEqual(list(delays(5, first=1, longest=3)), [1, 2, 3, 3])

    def test_jitter(self):
        self.assertEqual(list(delays(3, first=1, jitter=0.5, rng=lambda: 1.0)), [1.5, 3.0])

    def test_one_attempt_has_no_pause(self):
        self.assertEqual(list(delays(1)), [])

    def test_jitter_never_passes_the_longest(self):
        pauses = list(delays(5, first=1, longest=4, jitter=0.5, rng=lambda: 1.0))
        self.assertEqual(pauses, [1.5, 3.0, 4, 4])

    def test_many_attempts_stay_below_the_longest(self):
        self.assertLessEqual(max(delays(50, longest=30, jitter=1.0, rng=lambda: 0.9)), 30)
