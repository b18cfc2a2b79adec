import unittest

from spans import subtract


class SubtractTest(unittest.TestCase):
    def test_nothing(self):
        self.assertEqual(subtract([(1, 5)], []), [(1, 5)])

    def test_from_the_left(self):
        self.assertEqual(subtract([(1, 5)], [(0, 2)]), [(2, 5)])

    def test_from_the_right(self):
        self.assertEqual(subtract([(1, 5)], [(4, 9)]), [(1, 4)])

    def test_all(self):
        self.assertEqual(subtract([(1, 5)], [(0, 9)]), [])
