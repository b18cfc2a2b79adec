import unittest

from spans import covered, merge


class MergeTest(unittest.TestCase):
    def test_apart(self):
        self.assertEqual(merge([(5, 6), (1, 2)]), [(1, 2), (5, 6)])

    def test_overlapping(self):
        self.assertEqual(merge([(1, 4), (3, 6)]), [(1, 6)])

    def test_touching(self):
        self.assertEqual(merge([(1, 2), (2, 3)]), [(1, 3)])

    def test_empty_ones_vanish(self):
        self.assertEqual(merge([(1, 1), (3, 2)]), [])

    def test_covered(self):
        self.assertEqual(covered([(0, 2), (1, 3), (10, 11)]), 4)
