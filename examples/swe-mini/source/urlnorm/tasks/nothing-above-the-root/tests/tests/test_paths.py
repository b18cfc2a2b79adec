import unittest

from urlnorm.paths import remove_dot_segments


class PathsTest(unittest.TestCase):
    def test_nothing_to_do(self):
        self.assertEqual(remove_dot_segments("/a/b/"), "/a/b/")

    def test_inside(self):
        self.assertEqual(remove_dot_segments("/a/./b/../c"), "/a/c")

    def test_at_the_end(self):
        self.assertEqual(remove_dot_segments("/a/b/.."), "/a/")
        self.assertEqual(remove_dot_segments("/a/b/."), "/a/b/")

    def test_above_the_root(self):
        self.assertEqual(remove_dot_segments("/../a"), "/a")
        self.assertEqual(remove_dot_segments("/../../../g"), "/g")

    def test_back_down_from_above_the_root(self):
        self.assertEqual(remove_dot_segments("/a/../../b/c"), "/b/c")

    def test_only_dots(self):
        self.assertEqual(remove_dot_segments("/.."), "/")
        self.assertEqual(remove_dot_segments("/../.."), "/")
