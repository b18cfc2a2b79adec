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

    def test_in_the_middle(self):
        self.assertEqual(subtract([(0, 10)], [(3, 4)]), [(0, 3), (4, 10)])

    def test_several_holes(self):
        left = subtract([(0, 10), (20, 30)], [(3, 4), (6, 7), (25, 26)])
        self.assertEqual(left, [(0, 3), (4, 6), (7, 10), (20, 25), (26, 30)])
