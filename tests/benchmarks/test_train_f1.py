import numpy as np
import pytest

from benchmarks.train.f1 import Found, macro_f1


def test_f1_is_the_harmonic_mean_of_precision_and_recall():
    precision, recall = 3 / 5, 3 / 4
    assert Found(predicted=5, there=4, right=3).f1 == pytest.approx(2 / (1 / precision + 1 / recall))
    assert Found().f1 == 0
    assert (Found(2, 1, 1) + Found(3, 3, 2)) == Found(5, 4, 3)


def test_macro_f1_weighs_classes_alike():
    classes = np.array([0, 0, 0, 0, 1, 2])
    assert macro_f1(classes, classes) == 1
    assert macro_f1(np.zeros(6, int), classes) == pytest.approx((8 / 10 + 0 + 0) / 3)
